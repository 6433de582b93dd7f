// SPDX-License-Identifier: Apache-2.0
// Loaded into the server before its own libraries: two calls of its HTTP library (libevhtp, in release 24.10), mended.
//
// send: the server hands an HTTP connection's work (start this answer, write its next part, end it) to the connection's
// thread through a socket pair of some 280 places, and does not look whether there was one (evthr_defer, called in
// http_server.cc). A thread that gets no processor for some 50 ms under 6,000 responses a second then loses the end of
// every stream that it has, or never ends them. Here who responds waits for room.
//
// accept4: connections are inherited by the stubs that the server starts while they are open. A client that reads to the
// end of its connection then waits as long as the stub lives. Here they are closed in what the server starts.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

// For a thread that would wait for itself; others have room again after milliseconds.
enum { LIMIT_MS = 10000 };

typedef ssize_t Send(int, const void *, size_t, int);
typedef int Accept(int, struct sockaddr *, socklen_t *, int);

static Send *next_send;
static Accept *next_accept;
static int is_server; // and not one of its children, which get its environment

__attribute__((constructor)) static void start(void) {
  next_send = (Send *)dlsym(RTLD_NEXT, "send");
  next_accept = (Accept *)dlsym(RTLD_NEXT, "accept4");
  is_server = strcmp(program_invocation_short_name, "tritonserver") == 0;
}

static int is_local(int fd) {
  int domain = 0;
  socklen_t size = sizeof domain;
  return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
  ssize_t sent;
  while ((sent = next_send(fd, data, size, flags)) < 0 && errno == EAGAIN && is_server && flags == 0 && is_local(fd)) {
    struct pollfd queue = {.fd = fd, .events = POLLOUT};
    int ready = poll(&queue, 1, LIMIT_MS);
    if (ready == 0 || (ready < 0 && errno != EINTR)) {
      errno = EAGAIN;
      return -1;
    }
  }
  return sent;
}

int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags) {
  return next_accept(fd, address, size, is_server ? flags | SOCK_CLOEXEC : flags);
}
