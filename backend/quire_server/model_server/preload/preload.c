// SPDX-License-Identifier: Apache-2.0
// LD_PRELOAD library for the server: works around defects of release 24.10 and later ones. defects.py lists the releases.
//
// Two are defects of its HTTP library, libevhtp:
//
// send: the server queues the work of an HTTP connection (start the response, write its next part, end it) for the
// connection's thread in a socket pair that has room for about 280 entries. It ignores a full queue (evthr_defer, called
// in http_server.cc). If the thread gets no CPU time for about 50 ms at 6,000 responses per second, its streams lose
// their ends or never end. This send waits until the queue has room.
//
// accept4: stubs inherit the connections that are open when the server starts them. A client that reads until the end of
// its connection then waits until the stub exits. This accept4 sets SOCK_CLOEXEC.
//
// Others end the server or one of its stubs, and with it the streams of all clients. QUIRE_SERVER_GUARD contains the
// names of the defects that this release has; 1 stands for all of them, and 0 turns all guards off. With any other value,
// all guards are on, except ignore_status_header, whose defect must be named:
//
// readv: only the HTTP library reads connections with it. Requests that crash the server (request_guard.h) get an error
// and never reach it.
//
// close_late_requests: the server waits forever for the rest of a request. A thread closes the connection if a request
// is not complete after QUIRE_GUARD_TIMEOUT_S. Connections without a request stay open, as in the pools of clients; only
// a new connection of the port QUIRE_GUARD_HTTP_PORT must send its first request in this time.
//
// If the file QUIRE_CLOSING_FILE exists, the pod is about to stop. readv then adds the header `Connection: close` to each
// request, so that the server ends the connection after its response.
//
// recvmsg: only gRPC reads connections with it. If a message is larger than twice QUIRE_GUARD_MAX_BODY_BYTES
// (grpc_guard.h), its connection is closed. QUIRE_GUARD_GRPC_PORT is the port of these connections.
//
// TRITONSERVER_InferenceRequestAddInput: the server multiplies the dimensions of a shape without a check for overflow,
// and the stub of the model then aborts. TRITONSERVER_InferenceRequestAppendInputData: the data of an input is copied to
// shared memory, which never shrinks. Larger ones than QUIRE_GUARD_MAX_BODY_BYTES are rejected.
//
// TRITONSERVER_DataTypeByteSize: the size of BYTES is 0, by which the server divides if a request asks for the classes
// of our outputs. Such a caller gets 1, and the server then rejects the request.
//
// ignore_status_header: the server uses a stream after it has freed it if an error and the end of the stream meet, and
// the stream has the header triton_grpc_error. The server then ignores this header, and errors stay in the responses.
//
// fchmod: the Python backend makes the regions of its stubs readable for all users. They contain prompts and outputs.
//
// insert_key: the server takes the key of its restricted APIs only as an argument, which all users of the machine can
// read.
//
// TRITONSERVER_ServerIsReady, TRITONSERVER_ServerModelIsReady: the server reports ready as soon as a model is loaded,
// even while the engine starts or is dead. If QUIRE_READINESS_FILE is set, its answer is true only if that file agrees
// (readiness_file.py describes it). This does not depend on QUIRE_SERVER_GUARD.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <malloc.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "grpc_guard.h"
#include "request_guard.h"

// Bounds the wait of a thread that would wait for itself. Otherwise the queue has room again after milliseconds.
enum { LIMIT_MS = 10000 };
enum { MAX_FDS = 1 << 20, MAX_DISCARDED_BYTES = 64 << 20 };
enum { MAX_READINESS_BYTES = 1 << 20, MAX_NAME_BYTES = 256 };
enum { DEFAULT_TIMEOUT_S = 60, DEFAULT_MAX_BODY_BYTES = 64 << 20 };
enum { ACCEPT_PAUSE_US = 100000 };
static const char CLOSE_HEADER[] = "Connection: close\r\n";
enum { CLOSE_HEADER_BYTES = sizeof CLOSE_HEADER - 1, MAX_PARTS = 8, MAX_PEEKED_BYTES = 4096 };
enum { LARGE_BYTES = 1 << 20, TRIM_AFTER_S = 3 };
enum { MAX_ELEMENTS = 1 << 28, INVALID_ARG = 3 };
enum { DIVISION_BYTES = 16 }; // after a call, in which the caller divides by its result

typedef ssize_t Send(int, const void *, size_t, int);
typedef int Accept(int, struct sockaddr *, socklen_t *, int);

typedef int Close(int);
typedef int ChangeMode(int, mode_t);
typedef ssize_t ReadV(int, const struct iovec *, int);
typedef ssize_t ReceiveMessage(int, struct msghdr *, int);
typedef uint32_t ByteSize(int);
typedef void *NewError(int, const char *);
typedef void *AddInput(void *, const char *, int, const int64_t *, uint64_t);
typedef void *AppendInputData(void *, const char *, const void *, size_t, int, int64_t);
typedef void *ServerIsReady(void *, bool *);
typedef void *ModelIsReady(void *, const char *, int64_t, bool *);

static Send *next_send;
static Accept *next_accept;
static Close *next_close;
static ChangeMode *next_fchmod;
static ReadV *next_readv;
static ReceiveMessage *next_recvmsg;
static ByteSize *next_byte_size;
static NewError *new_error;
static AddInput *next_add_input;
static AppendInputData *next_append_input_data;
static ServerIsReady *next_server_is_ready;
static ModelIsReady *next_model_is_ready;
static int is_server;  // false in the server's children, which inherit its environment
static int is_guarded; // true if the guards are on
static const char *readiness_path;
static const char *closing_path;
static volatile int is_closing; // true if the pod is about to stop
static uint64_t max_body_bytes;
static time_t timeout_s;
static int http_port, grpc_port; // 0: unknown

// State of each accepted connection, by file descriptor; one thread at a time uses a connection. Kept for the next
// connection with the same descriptor, but not used while `is_open` is 0.
typedef struct {
  volatile int is_open;
  int is_grpc;
  RequestScanner scanner;
  Http2Scanner http2;
} Connection;
static Connection *connections[MAX_FDS];
static volatile int num_fds;                                     // all used descriptors are smaller
static pthread_mutex_t closing = PTHREAD_MUTEX_INITIALIZER;      // a descriptor that is shut down is not reused meanwhile
static volatile int seconds_to_trim; // 0: no large request was read
static pthread_once_t late_requests_thread = PTHREAD_ONCE_INIT;

// Rename the header triton_grpc_error in the constants of the program, which is the first object. Names in HTTP/2 have no
// capital letters (RFC 9113, section 8.2), so no request has the new name.
static int ignore_status_header(struct dl_phdr_info *program, size_t size, void *data) {
  (void)size, (void)data;
  static const char name[] = "\0triton_grpc_error";
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  for (int i = 0; i < program->dlpi_phnum; i++) {
    const ElfW(Phdr) *segment = &program->dlpi_phdr[i];
    if (segment->p_type != PT_LOAD || segment->p_flags != PF_R) continue;
    char *start = (char *)(program->dlpi_addr + segment->p_vaddr), *end = start + segment->p_memsz;
    for (char *found = start; (found = memmem(found, (size_t)(end - found), name, sizeof name)) != NULL; found++) {
      char *first = (char *)((uintptr_t)(found + 1) / page * page);
      if (mprotect(first, page, PROT_READ | PROT_WRITE) != 0) continue;
      found[1] = 'T';
      mprotect(first, page, PROT_READ);
    }
  }
  return 1; // ends the iteration
}

static long long number_in_environment(const char *name, long long default_value) {
  const char *value = getenv(name);
  return value != NULL && *value != 0 ? atoll(value) : default_value;
}

// Return whether QUIRE_SERVER_GUARD names a defect, or is 1 or missing.
static int has_defect(const char *guard, const char *name) {
  if (guard == NULL || strcmp(guard, "1") == 0) return 1;
  size_t length = strlen(name);
  for (const char *found = guard; (found = strstr(found, name)) != NULL; found += length)
    if ((found == guard || found[-1] == ',') && (found[length] == ',' || found[length] == 0)) return 1;
  return 0;
}

// Replace the placeholder $QUIRE_SERVER_KEY in the arguments by the key. The memory that /proc/PID/cmdline shows stays as
// it is. Children do not inherit the variable.
static void insert_key(int argc, char **argv) {
  static const char placeholder[] = "$QUIRE_SERVER_KEY";
  const char *key = getenv(placeholder + 1);
  for (int i = 1; key != NULL && i < argc; i++) {
    char *found = strstr(argv[i], placeholder), *argument = NULL;
    if (found == NULL) continue;
    if (asprintf(&argument, "%.*s%s%s", (int)(found - argv[i]), argv[i], key, found + sizeof placeholder - 1) < 0) abort();
    argv[i] = argument;
  }
  unsetenv(placeholder + 1);
}

__attribute__((constructor)) static void start(int argc, char **argv) {
  next_send = (Send *)dlsym(RTLD_NEXT, "send");
  next_accept = (Accept *)dlsym(RTLD_NEXT, "accept4");
  next_close = (Close *)dlsym(RTLD_NEXT, "close");
  next_fchmod = (ChangeMode *)dlsym(RTLD_NEXT, "fchmod");
  next_readv = (ReadV *)dlsym(RTLD_NEXT, "readv");
  next_recvmsg = (ReceiveMessage *)dlsym(RTLD_NEXT, "recvmsg");
  next_byte_size = (ByteSize *)dlsym(RTLD_NEXT, "TRITONSERVER_DataTypeByteSize");
  next_server_is_ready = (ServerIsReady *)dlsym(RTLD_NEXT, "TRITONSERVER_ServerIsReady");
  next_model_is_ready = (ModelIsReady *)dlsym(RTLD_NEXT, "TRITONSERVER_ServerModelIsReady");
  readiness_path = getenv("QUIRE_READINESS_FILE");
  closing_path = getenv("QUIRE_CLOSING_FILE");
  is_server = strcmp(program_invocation_short_name, "tritonserver") == 0;
  if (is_server) insert_key(argc, argv);
  const char *guard = getenv("QUIRE_SERVER_GUARD");
  is_guarded = is_server && (guard == NULL || strcmp(guard, "0") != 0);
  new_error = (NewError *)dlsym(RTLD_NEXT, "TRITONSERVER_ErrorNew");
  next_add_input = (AddInput *)dlsym(RTLD_NEXT, "TRITONSERVER_InferenceRequestAddInput");
  next_append_input_data = (AppendInputData *)dlsym(RTLD_NEXT, "TRITONSERVER_InferenceRequestAppendInputData");
  max_body_bytes = (uint64_t)number_in_environment("QUIRE_GUARD_MAX_BODY_BYTES", DEFAULT_MAX_BODY_BYTES);
  timeout_s = (time_t)number_in_environment("QUIRE_GUARD_TIMEOUT_S", DEFAULT_TIMEOUT_S);
  grpc_port = (int)number_in_environment("QUIRE_GUARD_GRPC_PORT", 0);
  http_port = (int)number_in_environment("QUIRE_GUARD_HTTP_PORT", 0);
  if (is_guarded && has_defect(guard, "status-header")) dl_iterate_phdr(ignore_status_header, NULL);
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

static time_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1; // never 0
}

static void *close_late_requests(void *unused) {
  (void)unused;
  for (;; sleep(1)) {
    if (!is_closing && closing_path != NULL) is_closing = access(closing_path, F_OK) == 0;
    pthread_mutex_lock(&closing);
    for (int fd = 0; fd < num_fds; fd++) {
      Connection *connection = connections[fd];
      if (connection == NULL || !connection->is_open) continue;
      time_t started_at = connection->scanner.started_at;
      if (started_at != 0 && now() - started_at >= timeout_s) shutdown(fd, SHUT_RDWR);
    }
    pthread_mutex_unlock(&closing);
    // The memory of large requests stays in the heaps of the threads, where it is free after some seconds.
    if (seconds_to_trim > 0 && --seconds_to_trim == 0) malloc_trim(0);
  }
  return NULL;
}

static void start_late_requests_thread(void) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, close_late_requests, NULL) == 0) pthread_detach(thread);
}

// Find the port of a listening socket, and whether its address is a loopback address.
static void describe_listener(int fd, int *port, int *is_loopback) {
  union {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
  } address;
  socklen_t size = sizeof address;
  *port = *is_loopback = 0;
  if (getsockname(fd, &address.any, &size) != 0) return;
  if (address.any.sa_family == AF_INET) {
    *port = ntohs(address.v4.sin_port);
    *is_loopback = ntohl(address.v4.sin_addr.s_addr) >> 24 == 127;
  } else if (address.any.sa_family == AF_INET6) {
    *port = ntohs(address.v6.sin6_port);
    *is_loopback = IN6_IS_ADDR_LOOPBACK(&address.v6.sin6_addr);
  }
}

int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags) {
  int accepted = next_accept(fd, address, size, is_server ? flags | SOCK_CLOEXEC : flags);
  if (!is_guarded) return accepted;
  int error = errno, port, is_loopback;
  describe_listener(fd, &port, &is_loopback);
  if (accepted < 0) {
    // Without free descriptors, the server tries again at once, and writes a line for each attempt.
    if ((error == EMFILE || error == ENFILE) && port == http_port) usleep(ACCEPT_PAUSE_US);
    errno = error;
    return -1;
  }
  Connection **connection = accepted < MAX_FDS ? &connections[accepted] : NULL;
  if (connection != NULL && *connection == NULL) *connection = calloc(1, sizeof **connection);
  if (connection == NULL || *connection == NULL) {
    next_close(accepted);
    errno = ECONNABORTED;
    return -1;
  }
  pthread_mutex_lock(&closing);
  start_connection(&(*connection)->scanner, max_body_bytes, is_loopback);
  (*connection)->is_grpc = port != 0 && port == grpc_port;
  start_http2(&(*connection)->http2, 2 * max_body_bytes);
  if (port != 0 && port == http_port) (*connection)->scanner.started_at = now();
  (*connection)->is_open = 1;
  if (accepted >= num_fds) num_fds = accepted + 1;
  pthread_mutex_unlock(&closing);
  pthread_once(&late_requests_thread, start_late_requests_thread);
  return accepted;
}

int close(int fd) {
  if (!is_guarded || fd < 0 || fd >= MAX_FDS || connections[fd] == NULL || !connections[fd]->is_open)
    return next_close(fd);
  pthread_mutex_lock(&closing);
  connections[fd]->is_open = 0;
  pthread_mutex_unlock(&closing);
  return next_close(fd);
}

int fchmod(int fd, mode_t mode) {
  static const char regions[] = "/dev/shm/quire-";
  char link[32], path[sizeof regions] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  int is_region = size == sizeof path - 1 && strcmp(path, regions) == 0;
  return next_fchmod(fd, is_region ? mode & 0700 : mode);
}

// Send an error response and close the sending side.
static void refuse(int fd, const char *error) {
  char body[256], response[512];
  int size = snprintf(body, sizeof body, "{\"error\":\"INVALID_ARG: %s\"}", error);
  size = snprintf(response, sizeof response,
                  "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
                  "Content-Length: %d\r\n\r\n%s",
                  size, body);
  next_send(fd, response, size, MSG_NOSIGNAL);
  shutdown(fd, SHUT_WR);
}

// Read and discard what a refused client still sends, so that it can read its error. The server sees no data, and the
// end of the connection once the client closes it or has sent too much.
static ssize_t discard(int fd, RequestScanner *scanner, const struct iovec *parts, int num_parts) {
  ssize_t size;
  while ((size = next_readv(fd, parts, num_parts)) > 0) {
    scanner->remaining += size;
    if (scanner->remaining > MAX_DISCARDED_BYTES) return 0;
  }
  return size;
}

// Return where readv must insert CLOSE_HEADER: after the request line, if the pod is about to stop. Return 0 if the line
// has not arrived as a whole, or if there is no room: the server loses a request whose line it reads in pieces.
static size_t close_header_position(int fd, const RequestScanner *scanner, const struct iovec *parts, int num_parts) {
  if (!is_closing || scanner->phase != REQUEST_LINE || num_parts > MAX_PARTS) return 0;
  size_t room = 0;
  for (int i = 0; i < num_parts; i++) room += parts[i].iov_len;
  if (room <= CLOSE_HEADER_BYTES) return 0;
  char data[MAX_PEEKED_BYTES];
  size_t limit = room - CLOSE_HEADER_BYTES;
  ssize_t size = recv(fd, data, limit < sizeof data ? limit : sizeof data, MSG_PEEK | MSG_DONTWAIT);
  const char *end = size > 0 ? memchr(data, '\n', (size_t)size) : NULL;
  if (end == NULL) return 0;
  int is_empty = is_between_requests(scanner) && end - data <= 1; // Some clients send an empty line after a request.
  return is_empty ? 0 : (size_t)(end - data) + 1;
}

// Read, but leave room for CLOSE_HEADER.
static ssize_t read_with_room(int fd, const struct iovec *parts, int num_parts) {
  struct iovec smaller[MAX_PARTS];
  memcpy(smaller, parts, (size_t)num_parts * sizeof *parts);
  size_t left = CLOSE_HEADER_BYTES;
  for (int i = num_parts - 1; left > 0; i--) {
    size_t cut = left < smaller[i].iov_len ? left : smaller[i].iov_len;
    smaller[i].iov_len -= cut;
    left -= cut;
  }
  return next_readv(fd, smaller, num_parts);
}

static char *byte_at(const struct iovec *parts, size_t index) {
  while (index >= parts->iov_len) index -= parts++->iov_len;
  return (char *)parts->iov_base + index;
}

// Insert CLOSE_HEADER at a position. Return the new size.
static ssize_t add_close_header(const struct iovec *parts, size_t size, size_t position) {
  for (size_t i = size; i-- > position;) *byte_at(parts, i + CLOSE_HEADER_BYTES) = *byte_at(parts, i);
  for (size_t i = 0; i < CLOSE_HEADER_BYTES; i++) *byte_at(parts, position + i) = CLOSE_HEADER[i];
  return (ssize_t)(size + CLOSE_HEADER_BYTES);
}

ssize_t readv(int fd, const struct iovec *parts, int num_parts) {
  Connection *connection = is_guarded && fd >= 0 && fd < MAX_FDS ? connections[fd] : NULL;
  if (connection == NULL || !connection->is_open) return next_readv(fd, parts, num_parts);
  RequestScanner *scanner = &connection->scanner;
  if (scanner->phase == REFUSED) return discard(fd, scanner, parts, num_parts);
  int was_between_requests = is_between_requests(scanner);
  size_t position = close_header_position(fd, scanner, parts, num_parts);
  ssize_t size = position ? read_with_room(fd, parts, num_parts) : next_readv(fd, parts, num_parts);
  const char *error = NULL;
  ssize_t left = size;
  for (int i = 0; i < num_parts && left > 0 && error == NULL; i++) {
    size_t part = (size_t)left < parts[i].iov_len ? (size_t)left : parts[i].iov_len;
    error = scan_request(scanner, parts[i].iov_base, part);
    left -= part;
  }
  if (scanner->body_bytes > LARGE_BYTES) seconds_to_trim = TRIM_AFTER_S;
  // The end of a request sets started_at to 0.
  if (!is_between_requests(scanner) && (was_between_requests || scanner->started_at == 0)) scanner->started_at = now();
  if (error == NULL)
    return position && size >= (ssize_t)position ? add_close_header(parts, (size_t)size, position) : size;
  refuse(fd, error);
  scanner->remaining = 0;
  return discard(fd, scanner, parts, num_parts);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
  ssize_t size = next_recvmsg(fd, message, flags);
  Connection *connection = is_guarded && fd >= 0 && fd < MAX_FDS ? connections[fd] : NULL;
  if (size <= 0 || connection == NULL || !connection->is_open || !connection->is_grpc || flags & MSG_ERRQUEUE) return size;
  size_t left = (size_t)size;
  for (size_t i = 0; i < message->msg_iovlen && left > 0; i++) {
    const struct iovec *part = &message->msg_iov[i];
    size_t part_size = left < part->iov_len ? left : part->iov_len;
    if (!scan_http2(&connection->http2, part->iov_base, part_size)) {
      shutdown(fd, SHUT_RDWR);
      return 0;
    }
    left -= part_size;
  }
  return size;
}

// Return whether the code at `address` divides by a 64-bit register (REX.W F7 /6) within the next bytes.
static int divides(const unsigned char *address) {
  for (int i = 0; i < DIVISION_BYTES; i++)
    if ((address[i] & 0xfe) == 0x48 && address[i + 1] == 0xf7 && (address[i + 2] & 0xf8) == 0xf0) return 1;
  return 0;
}

uint32_t TRITONSERVER_DataTypeByteSize(int datatype) {
  uint32_t size = next_byte_size(datatype);
  return size == 0 && is_guarded && divides(__builtin_return_address(0)) ? 1 : size;
}

void *TRITONSERVER_InferenceRequestAddInput(void *request, const char *name, int datatype, const int64_t *shape,
                                            uint64_t num_dims) {
  if (is_guarded) {
    int64_t elements = 1;
    for (uint64_t i = 0; i < num_dims; i++) {
      // A dimension that is 0 does not hide the others.
      int64_t size = shape[i] > 0 ? shape[i] : 1;
      if (size > MAX_ELEMENTS / elements)
        return new_error(INVALID_ARG, "input: the shape has more than 268435456 elements; send fewer");
      elements *= size;
    }
  }
  return next_add_input(request, name, datatype, shape, num_dims);
}

void *TRITONSERVER_InferenceRequestAppendInputData(void *request, const char *name, const void *data, size_t size,
                                                   int memory_type, int64_t memory_type_id) {
  if (size > LARGE_BYTES) seconds_to_trim = TRIM_AFTER_S;
  if (is_guarded && size > max_body_bytes) {
    char error[80];
    snprintf(error, sizeof error, "input: must have at most %llu bytes", (unsigned long long)max_body_bytes);
    return new_error(INVALID_ARG, error);
  }
  return next_append_input_data(request, name, data, size, memory_type, memory_type_id);
}

// Return the readiness file as a string, or NULL; the caller frees it. A missing file is empty: nothing is ready.
static char *read_readiness(void) {
  int fd = open(readiness_path, O_RDONLY | O_CLOEXEC);
  struct stat status;
  if (fd >= 0 && (fstat(fd, &status) != 0 || status.st_size > MAX_READINESS_BYTES)) {
    next_close(fd);
    return NULL;
  }
  size_t size = fd < 0 ? 0 : (size_t)status.st_size;
  char *text = calloc(1, size + 1);
  if (fd >= 0) {
    if (text != NULL && read(fd, text, size) != (ssize_t)size) text[0] = 0;
    next_close(fd);
  }
  return text;
}

void *TRITONSERVER_ServerIsReady(void *server, bool *ready) {
  void *error = next_server_is_ready(server, ready);
  if (error != NULL || !*ready || readiness_path == NULL) return error;
  char *text = read_readiness();
  *ready = text != NULL && text[0] == '+';
  free(text);
  return NULL;
}

void *TRITONSERVER_ServerModelIsReady(void *server, const char *name, int64_t version, bool *ready) {
  void *error = next_model_is_ready(server, name, version, ready);
  if (error != NULL || !*ready || readiness_path == NULL || strlen(name) > MAX_NAME_BYTES) return error;
  char line[MAX_NAME_BYTES + 4];
  snprintf(line, sizeof line, "\n-%s\n", name);
  char *text = read_readiness();
  *ready = text != NULL && text[0] != 0 && strstr(text, line) == NULL;
  free(text);
  return NULL;
}
