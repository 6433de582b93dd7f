// SPDX-License-Identifier: Apache-2.0
// Of the driver, what Triton's launcher calls: machine code is taken, and its launches are queued and do nothing.

#include <cuda.h>

#include <cstring>
#include <functional>

#define API extern "C" __attribute__((visibility("default")))

extern "C" void emulator_enqueue_native(void* stream, std::function<void()>* work);
extern "C" int cudaDeviceGetAttribute(int* value, int attribute, int device);
extern "C" int cudaGetDevice(int* device);
extern "C" int emulator_is_device_memory(const void* pointer);

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 0;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0, *active = 1;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, attribute, device);
}
API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "emulated CUDA error";
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  // What ptxas writes: an ELF file.
  if (memcmp(image, "\177ELF", 4)) return CUDA_ERROR_INVALID_IMAGE;
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  *function = (CUfunction)1;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
  bool is_shared = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
  return is_shared && value > 232448 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr pointer) {
  if (!emulator_is_device_memory((const void*)pointer)) return CUDA_ERROR_INVALID_VALUE;
  *(CUdeviceptr*)value = pointer;
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void**, void**) {
  if (!config->gridDimX || !config->gridDimY || !config->gridDimZ) return CUDA_ERROR_INVALID_VALUE;
  if (config->gridDimY > 65535 || config->gridDimZ > 65535) return CUDA_ERROR_INVALID_VALUE;
  emulator_enqueue_native(config->hStream, new std::function<void()>([] {}));
  return CUDA_SUCCESS;
}
