// SPDX-License-Identifier: Apache-2.0
// Scanner of HTTP/2 connections: finds gRPC messages that are too large.
//
// The server reads messages of up to 2 GiB, and keeps the memory of the largest one. It also decompresses messages
// without a limit (at most 1 to 1,032). The scanner follows the frames (RFC 9113, section 4) and the prefixes of messages
// in DATA frames. A connection that does not start like HTTP/2 uses TLS, and is not scanned. The scanner reads no file
// and no socket; preload.c does.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
  FRAME_HEADER_BYTES = 9,
  MESSAGE_PREFIX_BYTES = 5, // a flag for compression, and the length
  MAX_OPEN_MESSAGES = 4096, // of one connection
  MAX_COMPRESSION = 256,    // a compressed message may have this part of the limit
  DATA_FRAME = 0,
  RST_STREAM_FRAME = 3,
  END_STREAM = 1,
  PADDED = 8,
};

typedef struct {
  uint32_t stream;
  uint32_t prefix_bytes, remaining;
  uint8_t prefix[MESSAGE_PREFIX_BYTES];
} Message;

typedef struct {
  uint64_t max_message_bytes;
  uint32_t preface_bytes, header_bytes, frame_bytes, padding, stream;
  uint32_t num_messages, capacity;
  uint8_t header[FRAME_HEADER_BYTES];
  uint8_t type, flags, expects_padding, is_ignored;
  Message *messages; // messages that are not complete, at most one of each stream
} Http2Scanner;

static void start_http2(Http2Scanner *s, uint64_t max_message_bytes) {
  free(s->messages);
  memset(s, 0, sizeof *s);
  s->max_message_bytes = max_message_bytes;
}

static Message *find_message(Http2Scanner *s, uint32_t stream) {
  for (uint32_t i = 0; i < s->num_messages; i++)
    if (s->messages[i].stream == stream) return &s->messages[i];
  return NULL;
}

static void remove_message(Http2Scanner *s, uint32_t stream) {
  Message *message = find_message(s, stream);
  if (message != NULL) *message = s->messages[--s->num_messages];
}

static Message *add_message(Http2Scanner *s, uint32_t stream) {
  if (s->num_messages == s->capacity) {
    uint32_t capacity = s->capacity ? 2 * s->capacity : 8;
    Message *messages = capacity > MAX_OPEN_MESSAGES ? NULL : realloc(s->messages, capacity * sizeof *messages);
    if (messages == NULL) return NULL;
    s->messages = messages;
    s->capacity = capacity;
  }
  Message *message = &s->messages[s->num_messages++];
  *message = (Message){.stream = stream};
  return message;
}

// Scan the next bytes of the messages of a stream. Return 0 if a message is too large.
static int scan_messages(Http2Scanner *s, const uint8_t *data, size_t size) {
  Message *message = size ? find_message(s, s->stream) : NULL;
  if (size && message == NULL && (message = add_message(s, s->stream)) == NULL) return 0;
  while (size) {
    if (message->prefix_bytes < MESSAGE_PREFIX_BYTES) {
      message->prefix[message->prefix_bytes++] = *data++;
      size--;
      if (message->prefix_bytes < MESSAGE_PREFIX_BYTES) continue;
      const uint8_t *prefix = message->prefix;
      message->remaining = (uint32_t)prefix[1] << 24 | (uint32_t)prefix[2] << 16 | (uint32_t)prefix[3] << 8 | prefix[4];
      if (message->remaining > (prefix[0] ? s->max_message_bytes / MAX_COMPRESSION : s->max_message_bytes)) return 0;
    }
    size_t part = size < message->remaining ? size : message->remaining;
    message->remaining -= (uint32_t)part;
    data += part;
    size -= part;
    if (message->remaining == 0) message->prefix_bytes = 0;
  }
  if (message != NULL && message->prefix_bytes == 0) remove_message(s, s->stream);
  return 1;
}

static void start_frame(Http2Scanner *s) {
  const uint8_t *header = s->header;
  s->header_bytes = s->padding = 0;
  s->frame_bytes = (uint32_t)header[0] << 16 | (uint32_t)header[1] << 8 | header[2];
  s->type = header[3];
  s->flags = header[4];
  s->stream = ((uint32_t)header[5] << 24 | (uint32_t)header[6] << 16 | (uint32_t)header[7] << 8 | header[8]) & 0x7fffffff;
  s->expects_padding = s->type == DATA_FRAME && s->flags & PADDED && s->frame_bytes > 0;
  if (s->type == RST_STREAM_FRAME) remove_message(s, s->stream);
}

// Scan the next bytes of a connection. Return 0 if the server must not see them.
static int scan_http2(Http2Scanner *s, const uint8_t *data, size_t size) {
  static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  while (size && !s->is_ignored) {
    if (s->preface_bytes < sizeof preface - 1) {
      s->is_ignored = *data != (uint8_t)preface[s->preface_bytes++];
      data++, size--;
    } else if (s->frame_bytes == 0) {
      s->header[s->header_bytes++] = *data++;
      size--;
      if (s->header_bytes == FRAME_HEADER_BYTES) start_frame(s);
    } else if (s->expects_padding) {
      s->expects_padding = 0;
      s->frame_bytes--;
      s->padding = *data < s->frame_bytes ? *data : s->frame_bytes;
      data++, size--;
    } else {
      uint32_t content = s->frame_bytes > s->padding ? s->frame_bytes - s->padding : 0;
      size_t part = size < s->frame_bytes ? size : s->frame_bytes;
      size_t content_part = part < content ? part : content;
      if (s->type == DATA_FRAME && !scan_messages(s, data, content_part)) return 0;
      s->frame_bytes -= (uint32_t)part;
      if (s->padding > s->frame_bytes) s->padding = s->frame_bytes;
      if (s->frame_bytes == 0 && s->type == DATA_FRAME && s->flags & END_STREAM) remove_message(s, s->stream);
      data += part;
      size -= part;
    }
  }
  return 1;
}
