// SPDX-License-Identifier: Apache-2.0
// libcuda and libcublasLt for a libcudnn that compiles plans on a machine without a device: "loading" a kernel succeeds,
// and writes its code to the folder CUDA_STUB_DUMP.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

unsigned long cublasLtGetVersion(void) { return 130100; }
unsigned long cublasLtGetCudartVersion(void) { return 13000; }
int cuInit(unsigned flags) { return 100; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuLibraryLoadData(void **library, const unsigned char *code) {
    const char *folder = getenv("CUDA_STUB_DUMP");
    *library = (void *)1;
    if (folder != NULL && memcmp(code, "\x7f" "ELF", 4) == 0) {
        size_t size = *(size_t *)(code + 40) + *(unsigned short *)(code + 58) * *(unsigned short *)(code + 60);
        char path[4096];
        static int number;
        snprintf(path, sizeof path, "%s/%d.cubin", folder, number++);
        FILE *file = fopen(path, "wb");
        fwrite(code, 1, size, file);
        fclose(file);
    }
    return 0;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = (void *)2; return 0; }
int cuLibraryUnload(void *library) { return 0; }
int cuLibraryLoadFromFile(void **library) { return 100; }
int cuKernelSetAttribute(void) { return 0; }
int cuKernelGetAttribute(void) { return 0; }
int cuOccupancyMaxPotentialClusterSize(void) { return 0; }
#define ABSENT(name) int name(void) { return 100; }
ABSENT(cuGetErrorName) ABSENT(cuGetErrorString) ABSENT(cuCtxGetCurrent) ABSENT(cuCtxGetLimit) ABSENT(cuCtxPopCurrent)
ABSENT(cuCtxPushCurrent) ABSENT(cuStreamGetCtx) ABSENT(cuLinkCreate) ABSENT(cuLinkAddData) ABSENT(cuLinkComplete)
ABSENT(cuLinkDestroy) ABSENT(cuLaunchKernel) ABSENT(cuLaunchCooperativeKernel) ABSENT(cuLaunchKernelEx)
ABSENT(cuDeviceGetCount) ABSENT(cuDeviceGet)
