// What the two portable kernels share: their parameters, which part of y and of k a block has, and what comes after the
// loop over k: the sums of the splits, and the store.
//
// Macros besides those of common.cuh: BLOCK_M, SLICES, WARPS_N, WARPS_M, WARPS_K (1 in portable_wide.cu).

#pragma once

#include "common.cuh"

struct Params {
  const u8* stream;           // the tile stream
  const u8* x;                // [m, k], rows `x_row_bytes` apart, 16-byte aligned
  u16* y;                     // [m, n], contiguous
  const u16* bias;            // [n] or null
  const float* column_scale;  // [n padded to 64] or null
  float4* partial;            // sums of all splits but the last
  u64* arrived;               // a flag for each of them
  u64 ticket;                 // what a flag says when its sums are there; another one in every call
  i64 x_row_bytes;
  int m, n, k;
  int k_tiles, n_tiles, tile_bytes;
  int scale_rows;             // rows of scales in a tile: 0, 1, 2 or 4
  int quarter[3];             // bytes from the first row of scales to those of the 2nd, 3rd and 4th quarter of the tile
  int zero_offset;            // bytes from a scale to its zero point, 0 if the weight is symmetric
  int n_blocks, m_blocks, splits;
};

constexpr int WARPS = WARPS_N * WARPS_M * WARPS_K;
constexpr int THREADS = 32 * WARPS;
constexpr int BLOCK_N = 16 * SLICES * WARPS_N;
constexpr int N_TILES = BLOCK_N / TILE_N;              // n tiles of a block
constexpr int COPIERS = THREADS / N_TILES;             // threads that fetch one n tile
constexpr int TOKENS = BLOCK_M / WARPS_M;              // tokens of a warp
constexpr int OCTETS = TOKENS / 8;                     // instructions across them
constexpr int X_ROW = TILE_K * 2;                      // bytes of a token in one k tile
constexpr int X_TILE = BLOCK_M * X_ROW;                // bytes of x in one k tile
constexpr int M_GROUP = 8;                             // blocks along m that run side by side, to meet in the L2

// Most 16-byte pieces a thread fetches of the weights in a stage: four granules of scales and zeros.
constexpr int TILE_BYTES_MAX = SCALE_OFFSET + (BITS == 16 ? 0 : 8 * SCALE_ROW_BYTES);
constexpr int W_ROUNDS = (WARPS_K * TILE_BYTES_MAX / 16 + COPIERS - 1) / COPIERS;

static_assert(BLOCK_N % TILE_N == 0 && THREADS % N_TILES == 0 && TOKENS % 8 == 0, "tile shape");

// What a block does.
struct Place {
  int m0, block_n;     // its first token, and which rows
  int k_begin, k_end;  // its part of k, in k tiles
};

__device__ __forceinline__ Place find_place(const Params& p) {
  int block;  // blockIdx.x, and the compiler does not know: what is found again after the loop stays in no register
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  // Which tile of y: groups of M_GROUP blocks along m stay together while n goes by, so that they share W in the L2.
  const int group_size = M_GROUP * p.n_blocks;
  const int group_m = block / group_size * M_GROUP, in_group = block % group_size;
  const int group_rows = min(M_GROUP, p.m_blocks - group_m);
  const int split = blockIdx.y;
  return {(group_m + in_group % group_rows) * BLOCK_M, in_group / group_rows,
          static_cast<int>(static_cast<i64>(p.k_tiles) * split / p.splits),
          static_cast<int>(static_cast<i64>(p.k_tiles) * (split + 1) / p.splits)};
}

constexpr int HOLDERS = 32 * WARPS_N * WARPS_M;  // threads of one layer

// Sums of the splits; true in the block of the last split, whose HOLDERS then have the whole sums. It waits for the
// others, which the hardware has started before it: they have lower block numbers. It leaves the flags cleared; no call
// before has used this ticket.
__device__ __forceinline__ bool add_splits(float (&acc)[SLICES][OCTETS][4], const Params& p) {
  const int thread = threadIdx.x, split = blockIdx.y;
  const bool holds = WARPS_K == 1 || thread < HOLDERS;
  if (p.splits > 1) {
    const int others = p.splits - 1;
    float4* partial = p.partial + static_cast<i64>(blockIdx.x) * others * (SLICES * OCTETS * HOLDERS);
    u64* arrived = p.arrived + static_cast<i64>(blockIdx.x) * others;
    if (split < others) {
      if (holds) {
#pragma unroll
        for (int r = 0; r < SLICES; ++r)
#pragma unroll
          for (int o = 0; o < OCTETS; ++o) {
            const float(&c)[4] = acc[r][o];
            __stcg(partial + (static_cast<i64>(split) * SLICES * OCTETS + r * OCTETS + o) * HOLDERS + thread,
                   make_float4(c[0], c[1], c[2], c[3]));
          }
        __threadfence();
      }
      __syncthreads();
      if (thread == 0) store_release(arrived + split, p.ticket);
      return false;
    }
    for (int s = thread; s < others; s += THREADS) {
      while (load_acquire(arrived + s) != p.ticket) __nanosleep(20);
      arrived[s] = 0;
    }
    __syncthreads();
    if (holds) {
#pragma unroll 1
      for (int s = 0; s < others; ++s)
#pragma unroll
        for (int r = 0; r < SLICES; ++r)
#pragma unroll
          for (int o = 0; o < OCTETS; ++o) {
            const float4 c =
                __ldcg(partial + (static_cast<i64>(s) * SLICES * OCTETS + r * OCTETS + o) * HOLDERS + thread);
            acc[r][o][0] += c.x;
            acc[r][o][1] += c.y;
            acc[r][o][2] += c.z;
            acc[r][o][3] += c.w;
          }
    }
  }
  return true;
}

// Store a warp's sums, which begin with slice `slice0` and token `token0` of the block.
__device__ __forceinline__ void store_sums(const float (&acc)[SLICES][OCTETS][4], int slice0, int token0,
                                           const Params& p) {
  const Place place = find_place(p);
  const int lane = threadIdx.x % 32, gq = lane / 4, t = lane % 4;
  // A lane holds rows gq and gq + 8 for tokens 2t, 2t + 1; the transposed fragment holds rows 2t, 2t + 1 (and + 8) of
  // token gq, neighbours in y.
#pragma unroll
  for (int r = 0; r < SLICES; ++r) {
    const int row0 = place.block_n * BLOCK_N + (slice0 + r) * 16;
    float scale_low = 1, scale_high = 1, bias_low = 0, bias_high = 0;
    const int low = row0 + gq, high = low + 8;
    if (p.column_scale != nullptr) {
      if (low < p.n) scale_low = p.column_scale[low];
      if (high < p.n) scale_high = p.column_scale[high];
    }
    if (p.bias != nullptr) {
      if (low < p.n) bias_low = widen(p.bias[low]);
      if (high < p.n) bias_high = widen(p.bias[high]);
    }
#pragma unroll
    for (int o = 0; o < OCTETS; ++o) {
      const float(&c)[4] = acc[r][o];
      u32 out[2];
      out[0] = transpose_8x8(round_pair(fmaf(c[0], scale_low, bias_low), fmaf(c[1], scale_low, bias_low)));
      out[1] = transpose_8x8(round_pair(fmaf(c[2], scale_high, bias_high), fmaf(c[3], scale_high, bias_high)));
      const int token = place.m0 + token0 + o * 8 + gq;
      if (token < p.m) {
        u16* y = p.y + static_cast<i64>(token) * p.n;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = row0 + half * 8 + 2 * t;
          if (row + 1 < p.n && p.n % 2 == 0) {
            *reinterpret_cast<u32*>(y + row) = out[half];
          } else {
            if (row < p.n) y[row] = static_cast<u16>(out[half]);
            if (row + 1 < p.n) y[row + 1] = static_cast<u16>(out[half] >> 16);
          }
        }
      }
    }
  }
}
