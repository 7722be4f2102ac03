// wgmma.sp with the weights in registers, for the TOKENS and the dtype (BF16) of the variant.
#pragma once

#include "hopper.cuh"

// ------------------------------------------------------------------------------------------------------------ wgmma

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64(i) D16(i), D16(i + 16), D16(i + 32), D16(i + 48)
#define L8 "%0,%1,%2,%3"
#define L16 L8 ",%4,%5,%6,%7"
#define L32 L16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define L64 L32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define L128                                                               \
    L64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
        ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#if TOKENS == 32
#define D_LIST L32
#define D_OPERANDS D16(0)
#define A_LIST "{%16,%17,%18,%19}, %20"
#define META_LIST "%21, %22"
#elif TOKENS == 64
#define D_LIST L64
#define D_OPERANDS D16(0), D16(16)
#define A_LIST "{%32,%33,%34,%35}, %36"
#define META_LIST "%37, %38"
#elif TOKENS == 128
#define D_LIST L128
#define D_OPERANDS D64(0)
#define A_LIST "{%64,%65,%66,%67}, %68"
#define META_LIST "%69, %70"
#endif
#if BF16
#define IN_TYPE "bf16"
#else
#define IN_TYPE "f16"
#endif
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// d[64 rows, tokens] += a[64, 32] . x[32, tokens]; a is 2:4, 16 of 32 stored. The selector says which two lanes of a
// quad hold metadata.
template <int kSelector>
__device__ __forceinline__ void wgmma(float (&d)[TOKENS / 2], const u32 (&a)[4], u64 x, u32 meta) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sp.sync.aligned.m64n" TEXT(TOKENS) "k32.f32." IN_TYPE "." IN_TYPE " {" D_LIST "}, " A_LIST
                                                            ", " META_LIST ", p, 1, 1, 0;\n}"
        : D_OPERANDS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(meta), "n"(kSelector));
}

#if TOKENS == 128
// The same with a in shared memory, too.
template <int kSelector>
__device__ __forceinline__ void wgmma(float (&d)[TOKENS / 2], u64 a, u64 x, u32 meta) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sp.sync.aligned.m64n128k32.f32." IN_TYPE "." IN_TYPE " {" D_LIST
        "}, %64, %65, %66, %67, p, 1, 1, 0, 0;\n}"
        : D_OPERANDS
        : "l"(a), "l"(x), "r"(meta), "n"(kSelector));
}
#endif
