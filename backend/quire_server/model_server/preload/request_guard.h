// SPDX-License-Identifier: Apache-2.0
// Scanner of HTTP/1.1 request streams and JSON bodies: finds requests that crash the server of release 24.10.
//
// The server's JSON parser recurses once per level, and 50,000 levels exhaust its stack. The server also keeps one entry
// on the stack for each piece of a body, and a body of 1,000,000 chunks exhausts it. The scanner accepts only requests
// whose boundaries every HTTP parser finds at the same places (RFC 9112): it rejects folded headers, control characters,
// repeated or contradicting lengths, chunk extensions and trailers. It also rejects compressed bodies, which it cannot
// scan: the server accepts them only for models that are not Quire's. The server converts the values of Accept-Encoding
// and Inference-Header-Content-Length to numbers, and ends if a number is invalid or too large. defects.py lists all
// defects. The scanner reads no file and no socket; preload.c does.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

enum {
  MAX_JSON_DEPTH = 500,       // levels of arrays and objects; the stack has room for about 50,000
  MAX_BODY_PIECES = 65536,    // an entry has 16 bytes, and the stack 8 MiB
  MAX_HEAD_BYTES = 65536,     // of the request line and the headers
  LINE_PREFIX_BYTES = 96,     // stored of each line: enough for the headers that define a length
  MAX_LENGTH_DIGITS = 15,
  MAX_HEADER_LENGTH_DIGITS = 9, // fits into an int
};

typedef struct {
  uint32_t depth;
  uint8_t in_string, escaped, ended;
} JsonDepth;

typedef enum { REQUEST_LINE, HEADERS, BODY, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, LAST_CHUNK_END, REFUSED } Phase;

typedef struct {
  Phase phase;
  uint64_t remaining; // bytes of the body or of the chunk
  uint64_t max_body_bytes, body_bytes;
  time_t started_at; // when the first byte of the request arrived; 0 before that. preload.c sets it.
  uint32_t head_bytes, pieces, line_bytes;
  uint8_t after_cr, has_length, is_chunked, is_version_1_0;
  uint8_t had_request; // true after the first request line of the connection
  uint8_t is_local; // true if the port listens on this machine only
  char line[LINE_PREFIX_BYTES + 1];
  char line_end[10]; // the last bytes of the request line, for its version
  JsonDepth json;
} RequestScanner;

// Return an error message if the JSON text is nested too deeply. Text after the outermost value is ignored.
static const char *scan_json(JsonDepth *json, const char *data, size_t size) {
  for (size_t i = 0; i < size && !json->ended; i++) {
    char c = data[i];
    if (json->escaped) {
      json->escaped = 0;
    } else if (json->in_string) {
      json->escaped = c == '\\';
      json->in_string = c != '"';
    } else if (c == '"') {
      json->in_string = 1;
    } else if (c == '[' || c == '{') {
      if (++json->depth > MAX_JSON_DEPTH) return "request body: arrays and objects are nested more than 500 levels deep";
    } else if (c == ']' || c == '}') {
      json->ended = json->depth <= 1;
      json->depth -= json->depth > 0;
    }
  }
  return NULL;
}

static int is_token(char c) { return c > ' ' && c < 127 && !strchr("\"(),/:;<=>?@[\\]{}", c); }

static const char *end_of_request_line(RequestScanner *s) {
  size_t method = 0;
  while (s->line[method] >= 'A' && s->line[method] <= 'Z') method++;
  if (method == 0 || s->line[method] != ' ') return "request line: the method is not valid";
  s->is_version_1_0 = memcmp(s->line_end, " HTTP/1.0", 9) == 0;
  if (!s->is_version_1_0 && memcmp(s->line_end, " HTTP/1.1", 9) != 0) return "request line: the version is not HTTP/1.1";
  return NULL;
}

// Return the value of the header in `line` without the white space around it, if its name is `name`.
static char *header_value(char *line, const char *name) {
  size_t length = strlen(name);
  if (strncasecmp(line, name, length) != 0 || line[length] != ':') return NULL;
  char *value = line + length + 1;
  value += strspn(value, " \t");
  for (char *end = value + strlen(value); end > value && (end[-1] == ' ' || end[-1] == '\t');) *--end = 0;
  return value;
}

// Return whether each weight in a list of encodings has the form of RFC 9110, section 12.4.2.
static int has_valid_weights(const char *value) {
  while ((value = strchr(value, ';')) != NULL) {
    value += 1 + strspn(value + 1, " \t");
    if (strncasecmp(value, "q=", 2) != 0) return 0;
    value += 2;
    if (*value != '0' && *value != '1') return 0;
    const char *digit = *value == '0' ? "0123456789" : "0";
    if (*++value == '.') {
      size_t digits = strspn(++value, digit);
      if (digits > 3) return 0;
      value += digits;
    }
    value += strspn(value, " \t");
    if (*value != ',' && *value != 0) return 0;
  }
  return 1;
}

// Return whether the value of the header Host is localhost or a loopback address, with or without a port.
static int is_this_machine(const char *host) {
  size_t length = strlen(host), port = length;
  while (port > 0 && host[port - 1] >= '0' && host[port - 1] <= '9') port--;
  if (port > 0 && port < length && host[port - 1] == ':') length = port - 1;
  if (length == 9 && strncasecmp(host, "localhost", 9) == 0) return 1;
  if (length == 5 && memcmp(host, "[::1]", 5) == 0) return 1;
  return length > 4 && memcmp(host, "127.", 4) == 0 && strspn(host, "0123456789.") >= length;
}

static const char *too_large(RequestScanner *s) {
  static __thread char error[80];
  if (s->body_bytes <= s->max_body_bytes) return NULL;
  snprintf(error, sizeof error, "request body: must have at most %llu bytes", (unsigned long long)s->max_body_bytes);
  return error;
}

static const char *end_of_header(RequestScanner *s) {
  size_t name = 0;
  while (is_token(s->line[name])) name++;
  if (name == 0 || (s->line[name] != ':' && name < LINE_PREFIX_BYTES)) return "header: the name is not valid";
  int is_short = s->line_bytes <= LINE_PREFIX_BYTES;
  char *value = header_value(s->line, "content-length");
  if (value != NULL) {
    size_t digits = strspn(value, "0123456789");
    if (s->has_length || s->is_chunked || !is_short || digits == 0 || digits > MAX_LENGTH_DIGITS || value[digits] != 0)
      return "header Content-Length: not one number";
    s->has_length = 1;
    s->remaining = s->body_bytes = strtoull(value, NULL, 10);
  }
  value = header_value(s->line, "transfer-encoding");
  if (value != NULL) {
    if (s->has_length || s->is_chunked || !is_short || s->is_version_1_0 || strcasecmp(value, "chunked") != 0)
      return "header Transfer-Encoding: only chunked is supported, without Content-Length, once";
    s->is_chunked = 1;
  }
  value = header_value(s->line, "content-encoding");
  if (value != NULL && (!is_short || strcasecmp(value, "identity") != 0))
    return "header Content-Encoding: only identity is supported; send the body without compression";
  value = header_value(s->line, "accept-encoding");
  if (value != NULL && (!is_short || !has_valid_weights(value)))
    return "header Accept-Encoding: too long, or a weight is not a number from 0 to 1 with at most 3 decimals";
  value = header_value(s->line, "inference-header-content-length");
  if (value != NULL) {
    size_t digits = strspn(value, "0123456789");
    if (!is_short || digits == 0 || digits > MAX_HEADER_LENGTH_DIGITS || value[digits] != 0)
      return "header Inference-Header-Content-Length: not the number of bytes of the JSON";
  }
  value = header_value(s->line, "host");
  if (value != NULL && s->is_local && (!is_short || !is_this_machine(value)))
    return "header Host: this port is for this machine only; use localhost";
  return NULL;
}

static void start_connection(RequestScanner *s, uint64_t max_body_bytes, int is_local) {
  memset(s, 0, sizeof *s);
  s->max_body_bytes = max_body_bytes;
  s->is_local = is_local != 0;
}

static void start_request(RequestScanner *s) {
  start_connection(s, s->max_body_bytes, s->is_local);
  s->had_request = 1;
}

static int is_between_requests(const RequestScanner *s) { return s->phase == REQUEST_LINE && s->line_bytes == 0; }

static const char *end_of_chunk_size(RequestScanner *s) {
  size_t digits = strspn(s->line, "0123456789abcdefABCDEF");
  if (digits == 0 || digits != s->line_bytes || digits > MAX_LENGTH_DIGITS - 3) return "chunk: the size is not valid";
  s->remaining = strtoull(s->line, NULL, 16);
  s->body_bytes += s->remaining;
  s->phase = s->remaining ? CHUNK_DATA : LAST_CHUNK_END;
  return too_large(s);
}

static const char *end_of_line(RequestScanner *s) {
  s->line[s->line_bytes < LINE_PREFIX_BYTES ? s->line_bytes : LINE_PREFIX_BYTES] = 0;
  const char *error = NULL;
  int is_empty = s->line_bytes == 0;
  switch (s->phase) {
  case REQUEST_LINE:
    // Some clients send an empty line after a request. After an empty line at its start, a connection never answers.
    if (is_empty && !s->had_request)
      error = "request line: is empty";
    else if (!is_empty && (error = end_of_request_line(s)) == NULL)
      s->phase = HEADERS;
    break;
  case HEADERS:
    if (!is_empty)
      error = end_of_header(s);
    else if ((error = too_large(s)) != NULL)
      break;
    else if (s->is_chunked)
      s->phase = CHUNK_SIZE;
    else if (s->remaining)
      s->phase = BODY;
    else
      start_request(s);
    break;
  case CHUNK_SIZE:
    error = end_of_chunk_size(s);
    break;
  case CHUNK_END:
    if (!is_empty) error = "chunk: longer than its size";
    s->phase = CHUNK_SIZE;
    break;
  default: // LAST_CHUNK_END
    if (!is_empty) error = "request body: trailers are not supported";
    start_request(s);
  }
  s->line_bytes = 0;
  return error;
}

static const char *scan_line_byte(RequestScanner *s, char c) {
  if (++s->head_bytes > MAX_HEAD_BYTES && s->phase <= HEADERS) return "headers: more than 64 KiB";
  if (c == '\n') {
    s->after_cr = 0;
    return end_of_line(s);
  }
  if (s->after_cr || (((unsigned char)c < ' ' && c != '\r' && c != '\t') || c == 127))
    return "request: control characters are not allowed in lines";
  s->after_cr = c == '\r';
  if (c == '\r') return NULL;
  if (s->line_bytes < LINE_PREFIX_BYTES) s->line[s->line_bytes] = c;
  s->line_bytes++;
  if (s->phase == REQUEST_LINE) {
    memmove(s->line_end, s->line_end + 1, 8);
    s->line_end[8] = c;
  }
  return s->phase > HEADERS && s->line_bytes > LINE_PREFIX_BYTES ? "chunk: the size is not valid" : NULL;
}

// Scan the next bytes of a connection. Return NULL, or an error message if the server must not see them.
static const char *scan_request(RequestScanner *s, const char *data, size_t size) {
  const char *error = NULL;
  size_t i = 0;
  while (i < size && error == NULL) {
    if (s->phase == BODY || s->phase == CHUNK_DATA) {
      size_t part = size - i < s->remaining ? size - i : s->remaining;
      error = scan_json(&s->json, data + i, part);
      if (++s->pieces > MAX_BODY_PIECES) error = "request body: more than 65536 pieces; send larger chunks";
      i += part;
      s->remaining -= part;
      if (s->remaining == 0 && s->phase == CHUNK_DATA)
        s->phase = CHUNK_END;
      else if (s->remaining == 0)
        start_request(s);
    } else {
      error = scan_line_byte(s, data[i++]);
    }
  }
  if (error != NULL) s->phase = REFUSED;
  return error;
}
