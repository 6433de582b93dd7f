// SPDX-License-Identifier: Apache-2.0
// Calls functions of the kernels' library for another process, which emulated_kernels.py uses: this program runs in an
// emulator of ARM64.
//
//   call_kernels LIBRARY ARENA BYTES
//
// ARENA is a file that both processes map. The first line of the output is the address of the arena here. Each line of
// the input is a function and its arguments, p or n for an integer and f for a number, such as `quire_pack p281 p0 n32`.
// After the call, a line with OpenMP's number of threads is written.

#include <dlfcn.h>
#include <fcntl.h>
#include <omp.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

int main(int, char** argv) {
  void* const library = dlopen(argv[1], RTLD_NOW);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
  const int file = open(argv[2], O_RDWR);
  void* const arena = mmap(nullptr, strtoull(argv[3], nullptr, 10), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (arena == MAP_FAILED) return perror("mmap"), 1;
  std::cout << (uint64_t)arena << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string name, word;
    words >> name;
    // In the calling convention of ARM64, integers and numbers have registers of their own, and those that do not fit
    // are on the stack, each in 8 bytes. No kernel has more than 8 numbers.
    constexpr int kMaxIntegers = 32, kMaxNumbers = 8;
    uint64_t n[kMaxIntegers] = {};
    float f[kMaxNumbers] = {};
    int integers = 0, numbers = 0;
    while (words >> word) {
      if (word[0] == 'f')
        f[numbers++] = strtof(word.c_str() + 1, nullptr);
      else
        n[integers++] = strtoull(word.c_str() + 1, nullptr, 10);
    }
    using Function = void (*)(float, float, float, float, float, float, float, float,
#define QUIRE_8 uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t
                              QUIRE_8, QUIRE_8, QUIRE_8, QUIRE_8);
    const auto function = (Function)dlsym(library, name.c_str());
    if (!function) return fprintf(stderr, "%s\n", dlerror()), 1;
#define QUIRE_N(i) n[i], n[i + 1], n[i + 2], n[i + 3], n[i + 4], n[i + 5], n[i + 6], n[i + 7]
    function(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], QUIRE_N(0), QUIRE_N(8), QUIRE_N(16), QUIRE_N(24));
    std::cout << omp_get_max_threads() << std::endl;
  }
}
