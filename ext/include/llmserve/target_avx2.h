// Include after all other headers: what follows in the file is compiled for AVX2, FMA and F16C.
// (Code of the standard library that is defined after this line would be, too, and the linker
// might pick it for every file.)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
