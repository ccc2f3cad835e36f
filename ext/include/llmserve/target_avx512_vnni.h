// As target_avx2.h, with AVX-512 F, BW, VL and VNNI.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"))), \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")
#endif
