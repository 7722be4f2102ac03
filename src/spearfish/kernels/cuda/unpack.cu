// The tile stream back to a dense row-major matrix of 16-bit floats, for a library product where that is faster (many
// tokens on a chip whose dense tensor cores beat mma.sp) and for gradients. Bound by the bytes it writes.
//
// A block takes one tile, a warp 16 of its rows. The fragments are those of the portable kernel, and so is every
// rounding: in 2:4 each register of a lane is exactly one quad, two kept values that go to two of four places.

#include "common.cuh"

struct Params {
  const u8* stream;           // the tile stream
  u16* dense;                 // [rows, row_stride], row 0 is the first row of tile `first_n_tile`
  const float* column_scale;  // [n padded to 64] or null
  i64 row_stride;             // in values, at least k padded to 128
  int k_tiles, tile_bytes, first_n_tile;
  int scale_rows;             // rows of scales in a tile: 0, 1, 2 or 4
  int quarter[3];             // bytes from the first row of scales to those of the 2nd, 3rd and 4th quarter of the tile
  int zero_offset;            // bytes from a scale to its zero point, 0 if the weight is symmetric
};

__device__ __forceinline__ u32 word_at(const u8* from) { return __ldg(reinterpret_cast<const u32*>(from)); }

#if BITS == 16
// What `load_matrices` gives a lane, from global memory.
__device__ __forceinline__ void load_global(u32 (&to)[4], const u8* from) {
  for (int i = 0; i < 4; ++i) to[i] = word_at(from + i / 2 * (CHUNK_BYTES / 2) + i % 2 * 128);
}
#else
__device__ __forceinline__ void load_global(u32 (&to)[4], const u8* from) {
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
#endif

extern "C" __global__ void __launch_bounds__(128) unpack_tiles(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, gq = lane / 4, t = lane % 4;
  const int k_tile = blockIdx.x, n_tile = p.first_n_tile + blockIdx.y;
  const u8* tile = p.stream + (static_cast<i64>(n_tile) * p.k_tiles + k_tile) * p.tile_bytes;
  const u8* codes = tile + warp * CODE_WARP_BYTES + lane * (BITS == 16 ? 4 : 16);
  [[maybe_unused]] const u8* metadata = tile + CODE_BYTES + warp * META_WARP_BYTES + gq * 4 * 8;
  [[maybe_unused]] const u8* scales = tile + SCALE_OFFSET + warp * (SCALE_ROW_BYTES / 4) + gq * 4;
  u16* rows[2];
  float column_scale[2] = {1, 1};
  for (int high = 0; high < 2; ++high) {
    const int row = warp * 16 + gq + 8 * high;
    rows[high] = p.dense + (static_cast<i64>(blockIdx.y) * TILE_N + row) * p.row_stride + k_tile * TILE_K;
    if (p.column_scale != nullptr) column_scale[high] = p.column_scale[n_tile * TILE_N + row];
  }

  constexpr int STEPS = TILE_K / STEP_K;
  [[maybe_unused]] u32 word[4];
  [[maybe_unused]] RowPairScale scale = unit_scale();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    [[maybe_unused]] const int quarter = step * STEP_K / 32;
    u32 a[4];
#if BITS == 16
    load_global(a, codes + step * CHUNK_BYTES);
#else
    if (step * STEP_K % 32 == 0 && p.scale_rows > 0) {
      const u8* row = scales + (quarter == 0 ? 0 : p.quarter[quarter - 1]);
      set_scale(scale, word_at(row));
      if (p.zero_offset != 0) set_zero(scale, word_at(row + p.zero_offset));
    }
    if (step % CHUNK_STEPS == 0) load_global(word, codes + step / CHUNK_STEPS * CHUNK_BYTES);
#if BITS == 4
    unpack(a, word[step % 4], scale);
#else
    unpack(a, word[step % 2 * 2], word[step % 2 * 2 + 1], scale);
#endif
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int high = i % 2, right = i / 2;  // row gq + 8 * high; the right half of the fragment's columns
      u32 pair = a[i];
      if (p.column_scale != nullptr)
        pair = round_pair(widen(static_cast<u16>(pair)) * column_scale[high],
                          widen(static_cast<u16>(pair >> 16)) * column_scale[high]);
#if SPARSE
      const u32 nibbles = word_at(metadata + (2 * (step % 2) + right) * 8 + step / 2 * 4);
      const u32 nibble = nibbles >> (16 * high + 4 * t);
      const u64 quad = static_cast<u64>(pair & 0xffff) << (nibble % 4 * 16) |
                       static_cast<u64>(pair >> 16) << (nibble / 4 % 4 * 16);
      *reinterpret_cast<u64*>(rows[high] + step * 32 + right * 16 + t * 4) = quad;
#else
      *reinterpret_cast<u32*>(rows[high] + step * 16 + right * 8 + t * 2) = pair;
#endif
    }
  }
}
