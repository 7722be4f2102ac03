// Pieces that every kernel of spearfish shares: asynchronous copies, tensor-core instructions, and the unpacking of
// 4- and 8-bit codes into pairs of 16-bit floats. Depends on nothing, not even a CUDA header: inline PTX throughout.
//
// Macros that pick the variant (kinds as in prepare.py):
//   BITS    4, 8 or 16    width of a code
//   SPARSE  1 or 0        2:4 or dense
//   BF16    1 or 0        activations, scales and results are bfloat16 or float16

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ------------------------------------------------------------------------------------------ the tile stream

constexpr int TILE_N = 64;
constexpr int TILE_K = 128;
constexpr int STEP_K = SPARSE ? 32 : 16;                                        // dense k of one instruction
constexpr int CODE_BYTES = TILE_N * TILE_K / (SPARSE ? 2 : 1) * BITS / 8;       // codes section of a tile
constexpr int META_BYTES = SPARSE ? TILE_N * TILE_K / 8 : 0;                    // metadata section
constexpr int SCALE_OFFSET = CODE_BYTES + META_BYTES;                           // where the scales begin
constexpr int SCALE_ROW_BYTES = TILE_N * 2;                                     // one granule of scales (or zeros)
constexpr int CODE_WARP_BYTES = BITS == 16 ? 256 : CODE_BYTES / 4;              // from one 16 rows to the next
constexpr int META_WARP_BYTES = META_BYTES / 4;
constexpr int CHUNK_BYTES = BITS == 16 ? CODE_BYTES / 4 : 32 * 16;              // 16 bytes for each lane of a warp
constexpr int CHUNK_STEPS = BITS == 4 ? 4 : BITS == 8 ? 2 : 1;                  // steps that one chunk holds

// Where lane `lane` reads 16 bytes of a warp's chunk: in order, or for 16 bits a row of the matrix it names for
// `load_matrices`, two of 8 rows below one another, then the same of the next eight columns.
__device__ __forceinline__ u32 code_offset(u32 lane) {
  return BITS == 16 ? lane % 16 * 16 + lane / 16 * (CHUNK_BYTES / 2) : lane * 16;
}

// ------------------------------------------------------------------------------------------ meeting

// Lanes of a warp that arrive at an mbarrier for it: one, after all have met, is enough. For compute-sanitizer's
// racecheck, which does not always see that meeting, all do.
#ifdef EVERY_LANE_ARRIVES
constexpr int kArriving = 32;
#else
constexpr int kArriving = 1;
#endif

// ------------------------------------------------------------------------------------------ memory

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, past the L1. `bytes` below 16 fills the rest with zeros.
__device__ __forceinline__ void copy_async(u32 to_shared, const void* from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }

template <int pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ u64 load_acquire(const u64* from) {
  u64 value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(u64* to, u64 value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ void load_shared(u32 (&to)[4], u32 from_shared) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from_shared));
}

__device__ __forceinline__ void load_shared(u32 (&to)[2], u32 from_shared) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from_shared));
}

__device__ __forceinline__ u32 load_shared(u32 from_shared) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from_shared));
  return word;
}

// Four 8 x 8 matrices of 16-bit values. Lane l names row l % 8 of matrix l / 8 by its address.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 from_shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from_shared));
}

// The transpose of an 8 x 8 matrix of 16-bit values that the warp holds one fragment register of.
__device__ __forceinline__ u32 transpose_8x8(u32 fragment) {
  u32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
  return result;
}

// ------------------------------------------------------------------------------------------ tensor cores

#if BF16
#define MMA_TYPES "f32.bf16.bf16.f32"
#else
#define MMA_TYPES "f32.f16.f16.f32"
#endif

// acc[16 x 8] += a[16 x 32, two of four stored] * b[32 x 8]. `selector` names the lanes whose metadata counts.
template <int selector>
__device__ __forceinline__ void mma_sparse(float (&acc)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
  asm volatile(
      "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col." MMA_TYPES
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
        "n"(selector));
}

// acc[16 x 8] += a[16 x 16] * b[16 x 8].
__device__ __forceinline__ void mma_dense(float (&acc)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col." MMA_TYPES
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ------------------------------------------------------------------------------------------ pairs of 16-bit floats

// a * b + c, rounded once. bfloat16 has no other arithmetic before sm_90, so sums and products are made of it too.
__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
  u32 result;
#if BF16
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
#endif
  return result;
}

constexpr u32 ONES = BF16 ? 0x3f803f80u : 0x3c003c00u;
constexpr u32 MINUS_ZEROS = 0x80008000u;

__device__ __forceinline__ u32 add_pair(u32 a, u32 b) { return fma_pair(a, ONES, b); }
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
#if BF16
  return fma_pair(a, b, MINUS_ZEROS);
#else
  u32 result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#endif
}
__device__ __forceinline__ u32 negate_pair(u32 a) { return a ^ 0x80008000u; }
__device__ __forceinline__ u32 both_low(u32 a) { return __byte_perm(a, 0, 0x1010); }
__device__ __forceinline__ u32 both_high(u32 a) { return __byte_perm(a, 0, 0x3232); }

// Two floats to a pair, `low` in the low half, each rounded to nearest even; overflow becomes infinity as in torch.
__device__ __forceinline__ u32 round_pair(float low, float high) {
  u32 result;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
#endif
  return result;
}

__device__ __forceinline__ float widen(u16 value) {
#if BF16
  return __uint_as_float(static_cast<u32>(value) << 16);
#else
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
  return result;
#endif
}

// ------------------------------------------------------------------------------------------ unpacking

// What turns codes of rows gq ("low") and gq + 8 ("high") into weights. A code c becomes a float by OR-ing its bits
// into the mantissa of a number whose unit is 1; subtracting that number and the zero point is exact, and the product
// with the scale is the one rounding. `offset` is minus what must be subtracted:
//   4 bit float16:  1024 + c for the low row; 1024 + 16 c, divided by 16 on the way, for the high row, whose nibble
//                   sits four bits higher: that saves the shift
//   4 bit bfloat16: 128 + c (seven mantissa bits)
//   8 bit float16:  1024 + c
//   8 bit bfloat16: eight bits do not fit beside a leading one. The low seven do: 128 + (c & 127), minus 128 if bit 7
//                   is set, else minus 256, is c - 128; `offset` is then 128 - zero point.
struct RowPairScale {
  u32 scale_low, scale_high;    // pairs
  u32 offset_low, offset_high;  // pairs
};

__device__ constexpr u32 pair_of(u32 half_word) { return half_word << 16 | half_word; }

#if BITS == 4
constexpr u32 SYMMETRIC_LOW = pair_of(BF16 ? 0xc308 : 0xe408);   // -136; -1032
constexpr u32 SYMMETRIC_HIGH = pair_of(BF16 ? 0xc308 : 0xd480);  // -136; -72
constexpr u32 BIAS_LOW = pair_of(BF16 ? 0xc300 : 0xe400);        // -128; -1024: plus minus the zero point
constexpr u32 BIAS_HIGH = pair_of(BF16 ? 0xc300 : 0xd400);       // -128; -64
#else
constexpr u32 SYMMETRIC_LOW = BF16 ? 0 : pair_of(0xe480);  // 0; -1152
constexpr u32 SYMMETRIC_HIGH = SYMMETRIC_LOW;
constexpr u32 BIAS_LOW = pair_of(BF16 ? 0x4300 : 0xe400);  // 128; -1024
constexpr u32 BIAS_HIGH = BIAS_LOW;
#endif

__device__ __forceinline__ RowPairScale unit_scale() {
  return {ONES, ONES, SYMMETRIC_LOW, SYMMETRIC_HIGH};
}

// `word` holds the scales of rows gq and gq + 8.
__device__ __forceinline__ void set_scale(RowPairScale& to, u32 word) {
  to.scale_low = both_low(word);
  to.scale_high = both_high(word);
}

// `word` holds the zero points of rows gq and gq + 8, as floats.
__device__ __forceinline__ void set_zero(RowPairScale& to, u32 word) {
  to.offset_low = add_pair(negate_pair(both_low(word)), BIAS_LOW);
  to.offset_high = add_pair(negate_pair(both_high(word)), BIAS_HIGH);
}

template <u32 mask, u32 exponent>
__device__ __forceinline__ u32 mask_or(u32 word) {
  u32 result;  // (word & mask) | exponent in one instruction; the compiler does not always see it
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "n"(mask), "n"(exponent));
  return result;
}

#if BITS != 16
// Register j of a step's fragment. `word` is the one that holds it: of 8-bit codes the first has a[0] and a[1].
template <int j>
__device__ __forceinline__ u32 unpack_register(u32 word, const RowPairScale& s) {
  constexpr bool high = j % 2 == 1;
  const u32 offset = high ? s.offset_high : s.offset_low, scale = high ? s.scale_high : s.scale_low;
#if BITS == 4 && BF16
  return multiply_pair(add_pair(mask_or<0x000f000fu, 0x43004300u>(word >> 4 * j), offset), scale);
#elif BITS == 4
  constexpr u32 base = 0x64006400u, sixteenths = 0x2c002c00u;
  if (j >= 2) word >>= 8;
  if (high) return multiply_pair(fma_pair(mask_or<0x00f000f0u, base>(word), sixteenths, offset), scale);
  return multiply_pair(add_pair(mask_or<0x000f000fu, base>(word), offset), scale);
#elif BITS == 8 && BF16
  // A pair of codes in bytes 0 and 2, minus 128.
  if (high) word >>= 8;
  const u32 minus = mask_or<0x00800080u, 0xc300c300u>(~word);
  const u32 code = add_pair(mask_or<0x007f007fu, 0x43004300u>(word), minus);
  return multiply_pair(add_pair(code, offset), scale);
#else
  return multiply_pair(add_pair(__byte_perm(word, 0x64646464u, high ? 0x4341 : 0x4240), offset), scale);
#endif
}

// One step: its word, or its two words, to the fragment a[0..3].
__device__ __forceinline__ void unpack(u32 (&a)[4], u32 word0, u32 word1, const RowPairScale& s) {
  a[0] = unpack_register<0>(word0, s);
  a[1] = unpack_register<1>(word0, s);
  a[2] = unpack_register<2>(word1, s);
  a[3] = unpack_register<3>(word1, s);
}
__device__ __forceinline__ void unpack(u32 (&a)[4], u32 word, const RowPairScale& s) { unpack(a, word, word, s); }
#endif
