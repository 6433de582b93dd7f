// SPDX-License-Identifier: Apache-2.0

// CoreDNS with the plugins that a cluster with one node needs. Its own program has 50 plugins, among them the clients of
// several clouds, and takes minutes longer to build.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() {
	dnsserver.Directives = []string{"bind", "errors", "kubernetes", "forward"}
	coremain.Run()
}
