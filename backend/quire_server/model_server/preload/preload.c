// SPDX-License-Identifier: Apache-2.0
// LD_PRELOAD library for the server: works around two defects of its HTTP library (libevhtp, in release 24.10).
//
// send: the server queues the work of an HTTP connection (start the response, write its next part, end it) for the
// connection's thread in a socket pair that has room for about 280 entries. It ignores a full queue (evthr_defer, called
// in http_server.cc). If the thread gets no CPU time for about 50 ms at 6,000 responses per second, its streams lose
// their ends or never end. This send waits until the queue has room.
//
// accept4: stubs inherit the connections that are open when the server starts them. A client that reads until the end of
// its connection then waits until the stub exits. This accept4 sets SOCK_CLOEXEC.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

// Bounds the wait of a thread that would wait for itself. Otherwise the queue has room again after milliseconds.
enum { LIMIT_MS = 10000 };

typedef ssize_t Send(int, const void *, size_t, int);
typedef int Accept(int, struct sockaddr *, socklen_t *, int);

static Send *next_send;
static Accept *next_accept;
static int is_server; // false in the server's children, which inherit its environment

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
