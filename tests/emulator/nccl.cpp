// SPDX-License-Identifier: Apache-2.0
// NCCL for the emulated runtime: ranks are processes that meet in shared memory when their streams reach the call.
//
// Collectives run one after another, each with two barriers of all ranks. An aborted rank, or a rank whose peers ended,
// leaves the barrier as NCCL's kernels do.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

extern "C" void emulator_enqueue_native(void* stream, std::function<void()>* work);

namespace {

constexpr size_t kRoom = 32 << 20;  // bytes that a rank can send at once

struct Id {
  char text[128];
};

struct Meeting {
  std::atomic<int> arrived[2];
  std::atomic<unsigned> round[2];
};

struct Comm {
  int rank, size;
  char* memory;
  std::atomic<bool> aborted{false};

  Meeting& meeting() { return *(Meeting*)memory; }
  char* mail(int rank) { return memory + 4096 + rank * kRoom; }

  bool barrier(int which) {
    auto& m = meeting();
    unsigned round = m.round[which];
    if (++m.arrived[which] == size) {
      m.arrived[which] = 0;
      ++m.round[which];
      return true;
    }
    while (m.round[which] == round) {
      if (aborted) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }
};

size_t width(int type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return widths[type];
}

float widen(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

template <class T>
void reduce(T* to, const T* from, size_t count, int how) {
  for (size_t i = 0; i < count; i++) to[i] = how == 0 ? to[i] + from[i] : how == 2 ? std::max(to[i], from[i]) : std::min(to[i], from[i]);
}

void reduce_any(void* to, const void* from, size_t count, int type, int how) {
  switch (type) {
    case 2: reduce((int32_t*)to, (const int32_t*)from, count, how); break;
    case 4: reduce((int64_t*)to, (const int64_t*)from, count, how); break;
    case 7: reduce((float*)to, (const float*)from, count, how); break;
    case 8: reduce((double*)to, (const double*)from, count, how); break;
    case 9:
      for (size_t i = 0; i < count; i++)
        ((uint16_t*)to)[i] = narrow(widen(((uint16_t*)to)[i]) + widen(((const uint16_t*)from)[i]));
      break;
    default: fprintf(stderr, "emulated NCCL: no reduction of type %d\n", type), abort();
  }
}

struct Transfer {
  Comm* comm;
  void* stream;
  const void* from;
  void* to;
  size_t bytes;
  int peer;
};

thread_local int depth = 0;
thread_local std::vector<Transfer> transfers;

void exchange(Comm* comm, void* stream, const void* from, size_t bytes, std::function<void()> take) {
  if (bytes > kRoom) fprintf(stderr, "emulated NCCL: %zu bytes at once\n", bytes), abort();
  emulator_enqueue_native(stream, new std::function<void()>([=] {
    if (from && bytes) memcpy(comm->mail(comm->rank), from, bytes);
    if (!comm->barrier(0)) return;
    take();
    comm->barrier(1);
  }));
}

int flush() {
  if (transfers.empty()) return 0;
  auto all = std::move(transfers);
  transfers.clear();
  const void* from = nullptr;
  size_t bytes = 0;
  for (auto& t : all)
    if (t.from && t.peer != t.comm->rank) from = t.from, bytes = t.bytes;
  auto* comm = all[0].comm;
  exchange(comm, all[0].stream, from, bytes, [=] {
    for (auto& t : all)
      if (t.to) memcpy(t.to, comm->mail(t.peer), t.bytes);
  });
  return 0;
}

}  // namespace

API int ncclGetVersion(int* version) {
  *version = 22809;
  return 0;
}
API const char* ncclGetErrorString(int) { return "emulated NCCL error"; }
API const char* ncclGetLastError(Comm*) { return ""; }
API int ncclGetUniqueId(Id* id) {
  memset(id, 0, sizeof *id);
  static std::atomic<int> count{0};
  snprintf(id->text, sizeof id->text, "/quire-emulated-nccl-%d-%d", (int)getpid(), count++);
  return 0;
}
API int ncclCommInitRank(Comm** comm, int size, Id id, int rank) {
  size_t bytes = 4096 + size * kRoom;
  int file = shm_open(id.text, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, bytes)) return 2;
  *comm = new Comm{rank, size, (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)};
  close(file);
  if (!(*comm)->barrier(0)) return 2;
  shm_unlink(id.text);
  return 0;
}
API int ncclCommInitRankConfig(Comm** comm, int size, Id id, int rank, void*) {
  return ncclCommInitRank(comm, size, id, rank);
}
API int ncclCommDestroy(Comm*) { return 0; }
API int ncclCommFinalize(Comm*) { return 0; }
API int ncclCommAbort(Comm* comm) {
  comm->aborted = true;
  return 0;
}
API int ncclCommGetAsyncError(Comm*, int* error) {
  *error = 0;
  return 0;
}
API int ncclCommCount(Comm* comm, int* count) {
  *count = comm->size;
  return 0;
}
API int ncclCommUserRank(Comm* comm, int* rank) {
  *rank = comm->rank;
  return 0;
}
API int ncclGroupStart() {
  depth++;
  return 0;
}
API int ncclGroupEnd() { return --depth ? 0 : flush(); }
API int ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, void* stream) {
  transfers.push_back({comm, stream, from, nullptr, count * width(type), peer});
  return depth ? 0 : flush();
}
API int ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, void* stream) {
  transfers.push_back({comm, stream, nullptr, to, count * width(type), peer});
  return depth ? 0 : flush();
}
API int ncclAllReduce(const void* from, void* to, size_t count, int type, int how, Comm* comm, void* stream) {
  size_t bytes = count * width(type);
  exchange(comm, stream, from, bytes, [=] {
    memcpy(to, comm->mail(0), bytes);
    for (int rank = 1; rank < comm->size; rank++) reduce_any(to, comm->mail(rank), count, type, how);
  });
  return 0;
}
API int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Comm* comm, void* stream) {
  size_t bytes = count * width(type);
  exchange(comm, stream, comm->rank == root ? from : nullptr, bytes, [=] {
    if (comm->rank != root || from != to) memcpy(to, comm->mail(root), bytes);
  });
  return 0;
}
API int ncclBcast(void* both, size_t count, int type, int root, Comm* comm, void* stream) {
  return ncclBroadcast(both, both, count, type, root, comm, stream);
}
API int ncclAllGather(const void* from, void* to, size_t count, int type, Comm* comm, void* stream) {
  size_t bytes = count * width(type);
  exchange(comm, stream, from, bytes, [=] {
    for (int rank = 0; rank < comm->size; rank++) memcpy((char*)to + rank * bytes, comm->mail(rank), bytes);
  });
  return 0;
}
