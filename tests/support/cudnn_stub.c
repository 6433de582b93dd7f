// SPDX-License-Identifier: Apache-2.0
// As much of libcudnn as nvidia-cudnn-frontend needs to describe and validate a graph.
#include <stddef.h>

size_t cudnnGetVersion(void) { return 91900; }
int cudnnCreate(void **handle) { *handle = (void *)1; return 0; }
int cudnnDestroy(void *handle) { return 0; }
int cudnnSetStream(void *handle, void *stream) { return 0; }
const char *cudnnGetErrorString(int status) { return "an error of the stub"; }
void cudnnGetLastErrorString(char *message, size_t size) { message[0] = 0; }
