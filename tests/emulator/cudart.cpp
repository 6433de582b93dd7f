// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime without a GPU: what PyTorch's CUDA build calls of libcudart, on host memory.
//
// It is made to find faults, not to be fast. The runtime executes queued work as late as CUDA allows: when a thread
// waits for it or for a later event, and one piece after a query of its completion. A host buffer that is overwritten too
// early, a missing wait between streams, or memory that is freed during a copy therefore changes the results. A captured
// graph runs its nodes in a random order that its edges allow. Fresh memory is filled with 0xff (NaN, -1), and freed
// memory is unmapped. Calls that CUDA forbids during capture fail with CUDA's own errors.
//
// This library runs no kernels: device.py queues equivalent functions with `emulator_enqueue`. `emulator_unknown` lists
// kernels that were launched without an equivalent.

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

using Error = cudaError_t;
using Clock = std::chrono::steady_clock;

long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

const int kDevices = setting("EMULATOR_DEVICES", 1);
const size_t kTotal = (size_t)setting("EMULATOR_MIB", 1024) << 20;
const int kSms = setting("EMULATOR_SMS", 2);
// Nothing is computed: memory is not touched, so that there may be as much of it as a real device has.
const bool kDry = setting("EMULATOR_DRY", 0);

struct Stream;
struct Capture;

struct Mark {  // a point in a stream's work
  Stream* stream = nullptr;
  std::atomic<bool> done{false};
  Clock::time_point when;
};

struct Event {
  std::shared_ptr<Mark> mark;
  Capture* capture = nullptr;  // recorded in this capture, behind these nodes
  std::set<int> frontier;
};

struct Node {
  std::function<void()> run;
  std::set<int> before;
};

struct Graph {
  std::vector<Node> nodes;
};

struct Capture {
  unsigned long long id;
  Stream* origin;
  std::thread::id thread;
  cudaStreamCaptureMode mode;
  std::set<Stream*> streams;
  std::unique_ptr<Graph> graph = std::make_unique<Graph>();
  bool invalid = false;
};

struct Stream {
  int device = 0;
  unsigned flags = 0;
  std::deque<std::function<void()>> work;
  Capture* capture = nullptr;
  std::set<int> frontier;  // nodes of the capture that the next one comes after
};

// Never destroyed: threads outlive main.
std::mutex& books = *new std::mutex;                        // queues, captures and ranges; held shortly, never while work runs
std::recursive_mutex& runs = *new std::recursive_mutex;     // held while work runs
std::map<uintptr_t, size_t>& device_ranges = *new std::map<uintptr_t, size_t>;
std::map<uintptr_t, int>& range_devices = *new std::map<uintptr_t, int>;
std::map<uintptr_t, size_t>& pinned_ranges = *new std::map<uintptr_t, size_t>;
std::vector<size_t>& used = *new std::vector<size_t>(64, 0);
std::vector<Stream*>& defaults = *new std::vector<Stream*>(64, nullptr);
std::set<Stream*>& all_streams = *new std::set<Stream*>;
std::set<Capture*>& captures = *new std::set<Capture*>;
std::map<const void*, std::string>& kernel_names = *new std::map<const void*, std::string>;
std::set<std::string>& unknown = *new std::set<std::string>;
std::mt19937& dice = *new std::mt19937(setting("EMULATOR_SEED", 0));
unsigned long long next_capture = 1;
std::atomic<long> waits{0};  // of the host for the device
std::atomic<int> failed{0};  // a callback's: every wait after it fails, as after a kernel that crashed
int (*callback)(uint64_t) = nullptr;

thread_local int current = 0;
thread_local Error last = cudaSuccess;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

Error say(Error error) {
  if (error != cudaSuccess) last = error;
  return error;
}

// Who waits here with Python's lock would keep work from running that needs it.
class Running {
 public:
  Running() {
    if (runs.try_lock()) return;
    static auto has = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
    static auto save = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    static auto restore = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    void* state = has && has() ? save() : nullptr;
    runs.lock();
    if (state) restore(state);
  }
  ~Running() { runs.unlock(); }
};

Stream* stream_of(cudaStream_t handle) {
  if ((uintptr_t)handle > 2) return (Stream*)handle;
  if (!defaults[current]) {
    defaults[current] = new Stream;
    defaults[current]->device = current;
    all_streams.insert(defaults[current]);
  }
  return defaults[current];
}

bool step(Stream* stream) {  // with `runs`
  std::function<void()> next;
  {
    std::lock_guard lock(books);
    if (stream->work.empty()) return false;
    next = std::move(stream->work.front());
    stream->work.pop_front();
  }
  next();
  return true;
}

void finish(Mark* mark) {
  while (!mark->done && step(mark->stream)) {
  }
}

void finish(Stream* stream) {
  while (step(stream)) {
  }
}

std::atomic<bool> stopped{false};

// Ranks wait for each other's work, so it must also run in a process where no thread waits for it.
void progress() {
  while (!stopped) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Stream* chosen = nullptr;
    {
      std::lock_guard lock(books);
      std::vector<Stream*> busy;
      for (auto* stream : all_streams)
        if (!stream->work.empty()) busy.push_back(stream);
      if (!busy.empty()) chosen = busy[dice() % busy.size()];
    }
    if (!chosen) continue;
    std::lock_guard running(runs);
    if (!stopped) step(chosen);
  }
}

// Runs a piece of the work before a mark in a thread of its own. PyTorch's allocators query events while they hold a lock, for
// which another thread may wait with Python's lock, so work that needs Python must not run in a query.
void ask(const std::shared_ptr<Mark>& mark) {
  static auto& gate = *new std::mutex;
  static auto& wake = *new std::condition_variable;
  static auto& asked = *new std::set<std::shared_ptr<Mark>>;
  static bool begun = (std::thread([] {
                         while (true) {
                           std::shared_ptr<Mark> chosen;
                           {
                             std::unique_lock lock(gate);
                             wake.wait(lock, [] { return !asked.empty(); });
                             chosen = *asked.begin();
                             asked.erase(asked.begin());
                           }
                           // A destroyed stream has no work left.
                           std::lock_guard running(runs);
                           if (!stopped && !chosen->done) step(chosen->stream);
                         }
                       }).detach(),
                       true);
  (void)begun;
  std::lock_guard lock(gate);
  asked.insert(mark);
  wake.notify_one();
}

// With `books`.
int add(Stream* stream, std::function<void()> work) {
  if (stream->capture) {
    auto& nodes = stream->capture->graph->nodes;
    nodes.push_back({std::move(work), stream->frontier});
    stream->frontier = {(int)nodes.size() - 1};
    return nodes.size() - 1;
  }
  stream->work.push_back(std::move(work));
  static bool begun = kDevices > 1 && (std::thread(progress).detach(), true);
  (void)begun;
  return -1;
}

std::shared_ptr<Mark> add_mark(Stream* stream) {
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  stream->work.push_back([mark] {
    mark->when = Clock::now();
    mark->done = true;
  });
  return mark;
}

// What may disturb a capture, in its own thread or (mode global) in any; with `books`.
Error unsafe() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (auto* capture : captures) {
    bool own = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    bool foreign = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (own || foreign) {
      capture->invalid = true;
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  return cudaSuccess;
}

Error check_default(Stream* stream) {
  for (auto* other : defaults)
    if (stream == other && !stream->capture)
      for (auto* capture : captures)
        if (!(capture->origin->flags & cudaStreamNonBlocking)) {
          capture->invalid = true;
          return cudaErrorStreamCaptureImplicit;
        }
  return cudaSuccess;
}

// Of an event that may be asked now.
Error mark_of(Event* event, std::shared_ptr<Mark>* mark) {
  std::lock_guard lock(books);
  if (Error error = unsafe()) return error;
  if (event->capture) return cudaErrorCapturedEvent;
  *mark = event->mark;
  return cudaSuccess;
}

template <class Ranges>
bool within(const Ranges& ranges, const void* pointer) {
  auto found = ranges.upper_bound((uintptr_t)pointer);
  if (found == ranges.begin()) return false;
  --found;
  return (uintptr_t)pointer < found->first + found->second;
}

Error wait_stream(Stream* stream) {
  waits++;
  {
    std::lock_guard lock(books);
    if (stream->capture) {
      stream->capture->invalid = true;
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  Running running;
  finish(stream);
  return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

Error wait_device() {
  waits++;
  std::vector<Stream*> streams;
  {
    std::lock_guard lock(books);
    if (Error error = unsafe()) return error;
    for (auto* capture : captures) {
      capture->invalid = true;
      return cudaErrorStreamCaptureUnsupported;
    }
    for (auto* stream : all_streams)
      if (stream->device == current) streams.push_back(stream);
  }
  Running running;
  // Not the same order each time.
  std::shuffle(streams.begin(), streams.end(), dice);
  for (auto* stream : streams) finish(stream);
  return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

Error copy(void* to, const void* from, size_t size, cudaStream_t handle, bool blocking) {
  if (!size) return cudaSuccess;
  Stream* stream;
  bool capturing;
  bool wait = blocking;
  {
    std::lock_guard lock(books);
    stream = stream_of(handle);
    if (blocking)
      if (Error error = unsafe()) return error;
    if (Error error = check_default(stream)) return error;
    capturing = stream->capture;
    bool from_device = within(device_ranges, from), to_device = within(device_ranges, to);
    if (kDry) {
      // What comes back to the host is 0, and nothing else is moved.
      add(stream, [=] {
        if (!to_device) memset(to, 0, size);
      });
    } else if (!from_device && !within(pinned_ranges, from)) {
      // Pageable: read before the call returns.
      auto held = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + size);
      add(stream, [=] { memcpy(to, held->data(), size); });
    } else {
      add(stream, [=] { memmove(to, from, size); });
    }
    if (!to_device && !within(pinned_ranges, to)) wait = true;
  }
  return wait && !capturing ? wait_stream(stream) : wait ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

Error launch(const void* function, cudaStream_t handle) {
  std::lock_guard lock(books);
  Stream* stream = stream_of(handle);
  auto found = kernel_names.find(function);
  unknown.insert(found == kernel_names.end() ? "?" : found->second);
  add(stream, [] {});
  return check_default(stream);
}

void* map_memory(size_t size, bool poison) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  if (poison && !kDry) memset(memory, 0xff, size);
  return memory;
}

}  // namespace

// ---- what device.py calls ----

API void emulator_callback(int (*function)(uint64_t)) { callback = function; }

API int emulator_enqueue(cudaStream_t handle, uint64_t id) {
  std::lock_guard lock(books);
  Stream* stream = stream_of(handle);
  add(stream, [id] {
    if (!stopped && callback(id)) failed = 1;
  });
  return check_default(stream);
}

API void emulator_enqueue_native(void* handle, std::function<void()>* work) {
  std::lock_guard lock(books);
  add(stream_of((cudaStream_t)handle), [held = std::shared_ptr<std::function<void()>>(work)] { (*held)(); });
}

API void emulator_stop() {
  stopped = true;
  Running last_one_is_over;
}

API int emulator_finish(cudaStream_t handle) { return say(wait_stream(stream_of(handle))); }

API int emulator_is_device_memory(const void* pointer) {
  std::lock_guard lock(books);
  return within(device_ranges, pointer) || within(pinned_ranges, pointer);
}

API long emulator_waits() { return waits; }

API int emulator_is_capturing(cudaStream_t handle) { return stream_of(handle)->capture != nullptr; }

API const char* emulator_unknown() {
  static std::string text;
  std::lock_guard lock(books);
  text.clear();
  for (auto& name : unknown) text += name + "\n";
  return text.c_str();
}

// ---- devices ----

API Error cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}
API Error cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
API Error cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return say(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}
API Error cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch ((int)attribute) {
    case cudaDevAttrMultiProcessorCount: *value = kSms; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 6144; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
API Error cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "Emulated H200");
  found->uuid.bytes[0] = device + 1;
  found->totalGlobalMem = kTotal;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->warpSize = 32;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 0x7fffffff;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->major = 9;
  found->multiProcessorCount = kSms;
  found->maxThreadsPerMultiProcessor = 2048;
  found->l2CacheSize = 50 << 20;
  found->unifiedAddressing = found->canMapHostMemory = 1;
  return cudaSuccess;
}
API Error cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API Error cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API Error cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device);
  return cudaSuccess;
}
API Error cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
API Error cudaDeviceSynchronize() { return say(wait_device()); }
API Error cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
API Error cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
API Error cudaGetLastError() {
  Error found = last;
  last = cudaSuccess;
  return found;
}
API Error cudaPeekAtLastError() { return last; }
API const char* cudaGetErrorName(Error error) {
  switch ((int)error) {
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    default: return "cudaError";
  }
}
API const char* cudaGetErrorString(Error error) { return cudaGetErrorName(error); }
API Error cudaProfilerStart() { return cudaSuccess; }
API Error cudaProfilerStop() { return cudaSuccess; }

// ---- memory ----

API Error cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard lock(books);
  *total = kTotal;
  *free = kTotal - used[current];
  return cudaSuccess;
}
API Error cudaMalloc(void** pointer, size_t size) {
  std::lock_guard lock(books);
  if (Error error = unsafe()) return say(error);
  size_t rounded = (size + 4095) & ~(size_t)4095;
  if (used[current] + rounded > kTotal) return say(cudaErrorMemoryAllocation);
  if (!(*pointer = map_memory(rounded, true))) return say(cudaErrorMemoryAllocation);
  device_ranges[(uintptr_t)*pointer] = rounded;
  range_devices[(uintptr_t)*pointer] = current;
  used[current] += rounded;
  return cudaSuccess;
}
API Error cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  if (Error error = wait_device()) return say(error);
  std::lock_guard lock(books);
  auto found = device_ranges.find((uintptr_t)pointer);
  if (found == device_ranges.end()) return say(cudaErrorInvalidValue);
  used[range_devices[found->first]] -= found->second;
  munmap(pointer, found->second);
  range_devices.erase(found->first);
  device_ranges.erase(found);
  return cudaSuccess;
}
API Error cudaMallocAsync(void** pointer, size_t size, cudaStream_t) { return cudaMalloc(pointer, size); }
API Error cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
API Error cudaHostAlloc(void** pointer, size_t size, unsigned) {
  std::lock_guard lock(books);
  if (Error error = unsafe()) return say(error);
  size = (size + 4095) & ~(size_t)4095;
  if (!(*pointer = map_memory(size, true))) return say(cudaErrorMemoryAllocation);
  pinned_ranges[(uintptr_t)*pointer] = size;
  return cudaSuccess;
}
API Error cudaFreeHost(void* pointer) {
  if (Error error = wait_device()) return say(error);
  std::lock_guard lock(books);
  auto found = pinned_ranges.find((uintptr_t)pointer);
  if (found == pinned_ranges.end()) return say(cudaErrorInvalidValue);
  munmap(pointer, found->second);
  pinned_ranges.erase(found);
  return cudaSuccess;
}
API Error cudaHostRegister(void* pointer, size_t size, unsigned) {
  std::lock_guard lock(books);
  if (Error error = unsafe()) return say(error);
  if (pinned_ranges.count((uintptr_t)pointer)) return say(cudaErrorHostMemoryAlreadyRegistered);
  pinned_ranges[(uintptr_t)pointer] = size;
  return cudaSuccess;
}
API Error cudaHostUnregister(void* pointer) {
  if (Error error = wait_device()) return say(error);
  std::lock_guard lock(books);
  return pinned_ranges.erase((uintptr_t)pointer) ? cudaSuccess : say(cudaErrorHostMemoryNotRegistered);
}
API Error cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  std::lock_guard lock(books);
  memset(found, 0, sizeof *found);
  found->device = 0;
  if (within(device_ranges, pointer)) {
    found->type = cudaMemoryTypeDevice;
    found->device = std::prev(range_devices.upper_bound((uintptr_t)pointer))->second;
    found->devicePointer = (void*)pointer;
  } else if (within(pinned_ranges, pointer)) {
    found->type = cudaMemoryTypeHost;
    found->devicePointer = found->hostPointer = (void*)pointer;
  } else {
    found->type = cudaMemoryTypeUnregistered;
    found->hostPointer = (void*)pointer;
  }
  return cudaSuccess;
}
API Error cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return say(copy(to, from, size, stream, false));
}
API Error cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return say(copy(to, from, size, nullptr, true));
}
API Error cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return say(copy(to, from, size, stream, false));
}
API Error cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                            cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    if (Error error = copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width, stream, false))
      return say(error);
  return cudaSuccess;
}
API Error cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t handle) {
  std::lock_guard lock(books);
  Stream* stream = stream_of(handle);
  if (Error error = check_default(stream)) return say(error);
  add(stream, [=] {
    if (!kDry) memset(pointer, value, size);
  });
  return cudaSuccess;
}
API Error cudaMemset(void* pointer, int value, size_t size) { return cudaMemsetAsync(pointer, value, size, nullptr); }
API Error cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API Error cudaGetSymbolAddress(void** pointer, const void*) {
  static char room[4096];
  *pointer = room;
  return cudaSuccess;
}

// ---- streams and events ----

API Error cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int) {
  std::lock_guard lock(books);
  auto* stream = new Stream;
  stream->device = current;
  stream->flags = flags;
  all_streams.insert(stream);
  *handle = (cudaStream_t)stream;
  return cudaSuccess;
}
API Error cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
API Error cudaStreamDestroy(cudaStream_t handle) {
  Running running;
  finish((Stream*)handle);
  std::lock_guard lock(books);
  all_streams.erase((Stream*)handle);
  return cudaSuccess;
}
API Error cudaStreamSynchronize(cudaStream_t handle) { return say(wait_stream(stream_of(handle))); }
API Error cudaStreamQuery(cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  {
    std::lock_guard lock(books);
    if (stream->capture) {
      stream->capture->invalid = true;
      return say(cudaErrorStreamCaptureUnsupported);
    }
    if (stream->work.empty()) return failed ? say(cudaErrorLaunchFailure) : cudaSuccess;
  }
  if ((kDevices > 1 && !stopped) || !runs.try_lock()) return cudaErrorNotReady;
  step(stream);
  runs.unlock();
  std::lock_guard lock(books);
  return stream->work.empty() ? cudaSuccess : cudaErrorNotReady;
}
API Error cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
API Error cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  *handle = (cudaEvent_t) new Event;
  return cudaSuccess;
}
API Error cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
API Error cudaEventDestroy(cudaEvent_t handle) {
  delete (Event*)handle;
  return cudaSuccess;
}
API Error cudaEventRecord(cudaEvent_t handle, cudaStream_t where) {
  std::lock_guard lock(books);
  Stream* stream = stream_of(where);
  auto* event = (Event*)handle;
  if (Error error = check_default(stream)) return say(error);
  if (stream->capture) {
    event->capture = stream->capture;
    event->frontier = stream->frontier;
    event->mark = nullptr;
  } else {
    event->capture = nullptr;
    event->mark = add_mark(stream);
  }
  return cudaSuccess;
}
API Error cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
API Error cudaStreamWaitEvent(cudaStream_t where, cudaEvent_t handle, unsigned) {
  std::lock_guard lock(books);
  Stream* stream = stream_of(where);
  auto* event = (Event*)handle;
  if (event->capture) {
    if (!captures.count(event->capture)) return say(cudaErrorInvalidValue);
    if (stream->capture && stream->capture != event->capture) return say(cudaErrorStreamCaptureMerge);
    if (!stream->capture) {
      stream->capture = event->capture;
      stream->frontier.clear();
      event->capture->streams.insert(stream);
    }
    stream->frontier.insert(event->frontier.begin(), event->frontier.end());
    return cudaSuccess;
  }
  if (!event->mark) return cudaSuccess;
  if (stream->capture) {
    stream->capture->invalid = true;
    return say(cudaErrorStreamCaptureIsolation);
  }
  add(stream, [mark = event->mark] { finish(mark.get()); });
  return cudaSuccess;
}
API Error cudaEventQuery(cudaEvent_t handle) {
  std::shared_ptr<Mark> mark;
  if (Error error = mark_of((Event*)handle, &mark)) return say(error);
  if (!mark) return cudaSuccess;
  // A question never waits: work may, for another rank's, and is then progress()'s, or be under way elsewhere.
  if (!mark->done && !stopped && kDevices == 1) ask(mark);
  if (!mark->done && stopped && runs.try_lock()) {
    if (!mark->done) step(mark->stream);
    runs.unlock();
  }
  if (failed) return say(cudaErrorLaunchFailure);
  // As CUDA does: no error that is kept.
  return mark->done ? cudaSuccess : cudaErrorNotReady;
}
API Error cudaEventSynchronize(cudaEvent_t handle) {
  waits++;
  std::shared_ptr<Mark> mark;
  if (Error error = mark_of((Event*)handle, &mark)) return say(error);
  if (mark) {
    Running running;
    finish(mark.get());
  }
  return failed ? say(cudaErrorLaunchFailure) : cudaSuccess;
}
API Error cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  auto a = ((Event*)start)->mark, b = ((Event*)end)->mark;
  if (!a || !b) return say(cudaErrorInvalidResourceHandle);
  if (!a->done || !b->done) return say(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(b->when - a->when).count();
  return cudaSuccess;
}
API Error cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  std::lock_guard lock(books);
  add(stream_of(handle), [=] { function(argument); });
  return cudaSuccess;
}
API Error cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* argument, unsigned) {
  std::lock_guard lock(books);
  add(stream_of(handle), [=] { function(handle, cudaSuccess, argument); });
  return cudaSuccess;
}

// ---- graphs ----

API Error cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
API Error cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  std::lock_guard lock(books);
  if ((uintptr_t)handle <= 1) return say(cudaErrorStreamCaptureUnsupported);
  auto* stream = (Stream*)handle;
  if (stream->capture) return say(cudaErrorIllegalState);
  auto* capture = new Capture;
  capture->id = next_capture++;
  capture->origin = stream;
  capture->thread = std::this_thread::get_id();
  capture->mode = mode;
  capture->streams = {stream};
  stream->capture = capture;
  stream->frontier.clear();
  captures.insert(capture);
  return cudaSuccess;
}
API Error cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  std::lock_guard lock(books);
  auto* stream = (Stream*)handle;
  auto* capture = stream->capture;
  *graph = nullptr;
  if (!capture) return say(cudaErrorIllegalState);
  // Every piece must lie before the end of the stream that began.
  auto& nodes = capture->graph->nodes;
  std::set<int> joined, left = stream->frontier;
  while (!left.empty()) {
    int node = *left.begin();
    left.erase(left.begin());
    if (!joined.insert(node).second) continue;
    left.insert(nodes[node].before.begin(), nodes[node].before.end());
  }
  bool all = joined.size() == nodes.size();
  for (auto* other : capture->streams) {
    other->capture = nullptr;
    other->frontier.clear();
  }
  captures.erase(capture);
  // Not deleted: events that were recorded in it may still be asked.
  if (capture->invalid) return say(cudaErrorStreamCaptureInvalidated);
  if (!all) return say(cudaErrorStreamCaptureUnjoined);
  *graph = (cudaGraph_t)capture->graph.release();
  return cudaSuccess;
}
API Error cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  std::lock_guard lock(books);
  auto* capture = stream_of(handle)->capture;
  *status = !capture           ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
API Error cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                   cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                   size_t* count) {
  std::lock_guard lock(books);
  auto* capture = stream_of(handle)->capture;
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? (cudaGraph_t)capture->graph.get() : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
API Error cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  size_t found = ((Graph*)graph)->nodes.size();
  if (nodes)
    for (size_t i = 0; i < std::min(found, *count); i++) nodes[i] = (cudaGraphNode_t)&((Graph*)graph)->nodes[i];
  *count = found;
  return cudaSuccess;
}
API Error cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
  *count = 0;
  return cudaSuccess;
}
API Error cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = (cudaGraphExec_t) new std::shared_ptr<Graph>(new Graph(*(Graph*)graph));
  return cudaSuccess;
}
API Error cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  std::lock_guard lock(books);
  Stream* stream = stream_of(handle);
  if (Error error = check_default(stream)) return say(error);
  add(stream, [graph = *(std::shared_ptr<Graph>*)exec] {
    auto& nodes = graph->nodes;
    std::vector<int> missing(nodes.size());
    std::vector<std::vector<int>> after(nodes.size());
    std::vector<int> ready;
    for (size_t i = 0; i < nodes.size(); i++) {
      missing[i] = nodes[i].before.size();
      for (int before : nodes[i].before) after[before].push_back(i);
      if (!missing[i]) ready.push_back(i);
    }
    while (!ready.empty()) {
      std::swap(ready[dice() % ready.size()], ready.back());
      int next = ready.back();
      ready.pop_back();
      nodes[next].run();
      for (int follower : after[next])
        if (!--missing[follower]) ready.push_back(follower);
    }
  });
  return cudaSuccess;
}
API Error cudaGraphDestroy(cudaGraph_t graph) {
  delete (Graph*)graph;
  return cudaSuccess;
}
API Error cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete (std::shared_ptr<Graph>*)exec;
  return cudaSuccess;
}
API Error cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }

// ---- kernels ----

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
  kernel_names[host] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API Error __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configuration;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
API Error __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}
API Error cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return say(launch(function, stream));
}
API Error __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return say(launch((const void*)kernel, stream));
}
API Error cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return say(launch(function, config->stream));
}
API Error cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return say(launch(function, stream));
}
API Error cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 64;
  found->ptxVersion = found->binaryVersion = 90;
  return cudaSuccess;
}
API Error cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
API Error cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                           cudaDriverEntryPointQueryResult* status) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
