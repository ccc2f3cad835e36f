// What this machine can do at most, for floors and shares: bytes read a second from memory, by all
// threads and by one, in pages of 4 KiB and in huge ones; and multiply-adds a second in registers,
// of int8, int16, bfloat16 and float32. "avx2" are those of instructions of 256 bits where there
// are wider ones. Prints JSON; 0 for what the CPU has no instruction for. Usage: peak NUM_THREADS

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include <sys/mman.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int kNumTries = 7;
constexpr int64_t kNumSteps = 12'000'000;
constexpr int64_t kBufferBytes = int64_t{512} << 20;
// Independent sums: enough to hide the latency of an instruction.
constexpr int kNumSums = 12;

volatile int64_t sink;

double Seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// Work of one thread a second, in the best of several tries that run on all threads at once.
double BestRate(int num_threads, double work, const std::function<void(int)>& function) {
  double best = 0;
  for (int i = 0; i < kNumTries; ++i) {
    std::vector<std::thread> threads;
    const double begin = Seconds();
    for (int thread = 0; thread < num_threads; ++thread) threads.emplace_back(function, thread);
    for (std::thread& thread : threads) thread.join();
    best = std::max(best, work / (Seconds() - begin));
  }
  return best;
}

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kNumFloats = kVectorBytes / int{sizeof(float)};
typedef int64_t Ints __attribute__((vector_size(kVectorBytes)));
typedef float Floats __attribute__((vector_size(kVectorBytes)));

// Mapped for itself, so that the advice holds for all of it.
class Buffer {
 public:
  Buffer(size_t num_bytes, bool has_huge_pages) : num_bytes_(num_bytes) {
    data_ = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
#if defined(MADV_HUGEPAGE)
    // Advice only: a kernel without huge pages refuses it, and the figures are then alike.
    madvise(data_, num_bytes, has_huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
    std::memset(data_, 1, num_bytes);
  }
  ~Buffer() { munmap(data_, num_bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const Ints* data() const { return static_cast<const Ints*>(data_); }

 private:
  size_t num_bytes_;
  void* data_;
};

double ReadRate(int num_threads, const Buffer& buffer) {
  // Several streams a thread: one alone does not keep enough reads in flight.
  constexpr int kNumStreams = 4;
  const int64_t stream_len =
      kBufferBytes / int64_t{sizeof(Ints)} / (int64_t{num_threads} * kNumStreams);
  const auto num_bytes =
      static_cast<double>(stream_len * kNumStreams * num_threads * int64_t{sizeof(Ints)});
  return BestRate(num_threads, num_bytes, [&](int thread) {
    const Ints* data = buffer.data() + thread * kNumStreams * stream_len;
    Ints sums[kNumStreams] = {};
    for (int64_t i = 0; i < stream_len; ++i) {
      for (int j = 0; j < kNumStreams; ++j) sums[j] += data[j * stream_len + i];
    }
    Ints total = {};
    for (const Ints& sum : sums) total += sum;
    sink = total[0];
  });
}

// `step(sum)` does `num_macs` multiply-adds for one of kNumSums sums of type T.
template <typename T, typename Step>
double MacRate(int num_threads, int num_macs, Step step) {
  const int64_t num_rounds = kNumSteps / kNumSums;
  const double work = static_cast<double>(num_threads) * num_macs * num_rounds * kNumSums;
  return BestRate(num_threads, work, [&](int thread) {
    T sums[kNumSums] = {};
    sums[thread % kNumSums] = T{} + 1;
    for (int64_t i = 0; i < num_rounds; ++i) {
      for (int j = 0; j < kNumSums; ++j) sums[j] = step(sums[j]);
    }
    T total = {};
    for (int j = 0; j < kNumSums; ++j) total += sums[j];
    sink = static_cast<int64_t>(total[0]);
  });
}

double Float32Rate(int num_threads) {
  const Floats factor = Floats{} + 0.5f;
  return MacRate<Floats>(num_threads, kNumFloats, [=](Floats sum) {
    return sum * factor + factor;
  });
}

double Float32Avx2Rate([[maybe_unused]] int num_threads) {
#if defined(__AVX2__) && defined(__FMA__)
  const __m256 x = _mm256_set1_ps(0.5f);
  return MacRate<__m256>(num_threads, 8, [=](__m256 sum) { return _mm256_fmadd_ps(sum, x, x); });
#else
  return 0;
#endif
}

double Int16Avx2Rate([[maybe_unused]] int num_threads) {
#if defined(__AVX2__)
  const __m256i x = _mm256_set1_epi16(3);
  return MacRate<__m256i>(num_threads, 16, [=](__m256i sum) {
    // Not an intrinsic: the product is always the same, and would be computed once.
    __m256i products;
    asm volatile("vpmaddwd %1, %1, %0" : "=x"(products) : "x"(x));
    return _mm256_add_epi32(sum, products);
  });
#else
  return 0;
#endif
}

double Int16Rate(int num_threads) {
#if defined(__AVX512VNNI__)
  const __m512i x = _mm512_set1_epi16(3);
  return MacRate<__m512i>(num_threads, 32,
                          [=](__m512i sum) { return _mm512_dpwssd_epi32(sum, x, x); });
#else
  return Int16Avx2Rate(num_threads);
#endif
}

double Int8Rate([[maybe_unused]] int num_threads) {
#if defined(__AVX512VNNI__)
  const __m512i x = _mm512_set1_epi8(3);
  return MacRate<__m512i>(num_threads, 64,
                          [=](__m512i sum) { return _mm512_dpbusd_epi32(sum, x, x); });
#elif defined(__AVXVNNI__)
  const __m256i x = _mm256_set1_epi8(3);
  return MacRate<__m256i>(num_threads, 32, [=](__m256i sum) {
    return _mm256_dpbusd_avx_epi32(sum, x, x);
  });
#elif defined(__AVX2__)
  const __m256i x = _mm256_set1_epi8(3);
  const __m256i ones = _mm256_set1_epi16(1);
  return MacRate<__m256i>(num_threads, 32, [=](__m256i sum) {
    // The sum takes part in the product, or it would be computed once.
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_xor_si256(sum, x), x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
  });
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t x = vdupq_n_s8(3);
  return MacRate<int32x4_t>(num_threads, 16, [=](int32x4_t sum) { return vdotq_s32(sum, x, x); });
#else
  return 0;
#endif
}

double BFloat16Rate([[maybe_unused]] int num_threads) {
#if defined(__AVX512BF16__)
  const __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f));
  return MacRate<__m512>(num_threads, 32, [=](__m512 sum) {
    return _mm512_dpbf16_ps(sum, x, x);
  });
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x8_t x = vdupq_n_bf16(vcvth_bf16_f32(0.5f));
  return MacRate<float32x4_t>(num_threads, 8, [=](float32x4_t sum) {
    return vbfdotq_f32(sum, x, x);
  });
#else
  return 0;
#endif
}

}  // namespace

int main(int argc, char** argv) {
  const int num_threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (num_threads < 1) {
    std::fprintf(stderr, "usage: %s NUM_THREADS\n", argv[0]);
    return 2;
  }
  const auto print = [](const char* name, double value, const char* end) {
    std::printf("\"%s\": %.4g%s", name, value, end);
  };
  std::printf("{");
  for (const bool has_huge_pages : {false, true}) {
    const Buffer buffer(kBufferBytes, has_huge_pages);
    const char* names[] = {"read_bytes_per_s", "one_thread_read_bytes_per_s"};
    const char* huge_names[] = {"huge_pages_read_bytes_per_s",
                                "one_thread_huge_pages_read_bytes_per_s"};
    print((has_huge_pages ? huge_names : names)[0], ReadRate(num_threads, buffer), ", ");
    print((has_huge_pages ? huge_names : names)[1], ReadRate(1, buffer), ", ");
  }
  print("int8_macs_per_s", Int8Rate(num_threads), ", ");
  print("int16_macs_per_s", Int16Rate(num_threads), ", ");
  print("int16_avx2_macs_per_s", Int16Avx2Rate(num_threads), ", ");
  print("bfloat16_macs_per_s", BFloat16Rate(num_threads), ", ");
  print("float32_macs_per_s", Float32Rate(num_threads), ", ");
  print("float32_avx2_macs_per_s", Float32Avx2Rate(num_threads), "}\n");
}
