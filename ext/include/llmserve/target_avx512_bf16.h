// As target_avx512_vnni.h, with AVX-512 BF16.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16"))), \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")
#endif
