// y[m, n] = x[m, k] * W[n, k]^T on every NVIDIA GPU since sm_80, W being a tile stream (prepare.py draws it).
//
// The weight is the A operand (16 rows of n), x the B operand (8 tokens), so that unpacked weights go straight from
// registers into mma.sp and never through shared memory. A block makes BLOCK_M tokens x BLOCK_N rows:
//
//            tokens ->   WARPS_M warps, each BLOCK_M / WARPS_M tokens
//     rows of n          +---------+---------+
//     WARPS_N warps,     | warp    |         |   and WARPS_K such layers: the warps of layer j take k tile j of every
//     each 16 * SLICES   |         |         |   stage, and their sums meet in shared memory at the end
//                        +---------+---------+
//
// Both operands arrive through a ring of STAGES stages of WARPS_K k tiles by cp.async; one barrier per stage. Blocks
// with the same tile of y and another `split` share out the k tiles; their float32 sums go through global memory to
// the block of the last split, which adds them in order of split. So the result is the same in every run.
//
// Macros besides those of common.cuh: BLOCK_M, SLICES, WARPS_N, WARPS_M, WARPS_K, STAGES, MIN_BLOCKS.

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
constexpr int X_ROUNDS = WARPS_K * X_TILE / 16 / THREADS;  // 16-byte pieces of x in a stage, for each thread
constexpr int X_ROUND_ROWS = THREADS / 16;             // tokens (or tokens of several k tiles) fetched in a round
constexpr int M_GROUP = 8;                             // blocks along m that run side by side, to meet in the L2

// Most 16-byte pieces a thread fetches of the weights in a stage: four granules of scales and zeros.
constexpr int TILE_BYTES_MAX = SCALE_OFFSET + (BITS == 16 ? 0 : 8 * SCALE_ROW_BYTES);
constexpr int W_ROUNDS = (WARPS_K * TILE_BYTES_MAX / 16 + COPIERS - 1) / COPIERS;

static_assert(BLOCK_N % TILE_N == 0 && THREADS % N_TILES == 0 && TOKENS % 8 == 0, "tile shape");
static_assert(X_ROUNDS * THREADS * 16 == WARPS_K * X_TILE, "x divides evenly among the threads");
static_assert(BLOCK_M % X_ROUND_ROWS == 0 || X_ROUND_ROWS % BLOCK_M == 0, "a round starts a k tile or continues one");

// The warp's share of one k tile: unpack its rows and multiply them with its tokens. The tile goes by in quarters of
// 32 dense k. While the tensor cores work on one quarter, the next one is unpacked, slice by slice between the octets
// of tokens, and the next x is fetched: a warp issues in order, so the mixture has to be in the order of the code.
struct Warp {
  static constexpr int STEPS = 32 / STEP_K;  // instructions along k in a quarter
  // 16-bit fragments in four loads of a word rather than by one `ldmatrix`, with which the widest shapes ran out of
  // registers. Shared memory is as busy either way.
  static constexpr bool WORD_BY_WORD = BITS == 16 && OCTETS >= 8;

  u32 codes, metadata, scales;  // byte offsets into a stage, this lane's place included
  u32 x_even, x_odd;            // byte offsets into a stage, for even and odd quarters (the swizzle differs)

  struct Fragments {
    u32 a[SLICES][STEPS][4];
  };

  // Unpack slice r of a quarter. `word` keeps the 16-byte chunks, which may hold several steps, between calls.
  template <bool asymmetric>
  __device__ __forceinline__ void unpack_slice(Fragments& to, u32 (&word)[SLICES][4], int quarter, int r, u32 stage,
                                               const Params& p) const {
    const u32 chunks = stage + codes + r * CODE_WARP_BYTES;
#if BITS == 16
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const u32 from = chunks + (quarter * STEPS + i) * CHUNK_BYTES;
      if constexpr (WORD_BY_WORD) {
#pragma unroll
        for (int e = 0; e < 4; ++e) to.a[r][i][e] = load_shared(from + e / 2 * (CHUNK_BYTES / 2) + e % 2 * 128);
      } else {
        load_matrices(to.a[r][i], from);
      }
    }
#else
    const u32 row = stage + scales + r * (SCALE_ROW_BYTES / 4) + (quarter == 0 ? 0 : p.quarter[quarter - 1]);
    RowPairScale scale = unit_scale();
    // Without scales in the stream this reads something else, which counts for nothing: cheaper than a branch.
    const u32 pair = load_shared(row);
    set_scale(scale, p.scale_rows == 0 ? ONES : pair);
    if constexpr (asymmetric) set_zero(scale, load_shared(row + p.zero_offset));
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int step = quarter * STEPS + i;
      if (step % CHUNK_STEPS == 0) load_shared(word[r], chunks + step / CHUNK_STEPS * CHUNK_BYTES);
#if BITS == 4
      unpack(to.a[r][i], word[r][step % 4], scale);
#else
      unpack(to.a[r][i], word[r][step % 2 * 2], word[r][step % 2 * 2 + 1], scale);
#endif
    }
#endif
  }

  template <bool asymmetric>
  __device__ __forceinline__ void multiply(float (&acc)[SLICES][OCTETS][4], u32 stage, const Params& p) const {
    auto x_address = [&](int quarter, int octet) {
      return stage + (quarter % 2 == 0 ? x_even : x_odd) + quarter / 2 * 128 + octet * 8 * X_ROW;
    };
    u32 word[SLICES][4], meta[SLICES][2], b[2][4];
    Fragments fragments[2];
    load_matrices(b[0], x_address(0, 0));
#pragma unroll
    for (int r = 0; r < SLICES; ++r) {
      if constexpr (SPARSE) load_shared(meta[r], stage + metadata + r * META_WARP_BYTES);
      unpack_slice<asymmetric>(fragments[0], word, 0, r, stage, p);
    }
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const Fragments& now = fragments[quarter % 2];
#pragma unroll
      for (int o = 0; o < OCTETS; ++o) {
        const int turn = quarter * OCTETS + o;
        if (turn + 1 < 4 * OCTETS) load_matrices(b[(turn + 1) % 2], x_address((turn + 1) / OCTETS, (turn + 1) % OCTETS));
        const u32(&x)[4] = b[turn % 2];
#pragma unroll
        for (int r = 0; r < SLICES; ++r) {
#if SPARSE
          if (quarter % 2 == 0) mma_sparse<0>(acc[r][o], now.a[r][0], x, meta[r][quarter / 2]);
          else mma_sparse<1>(acc[r][o], now.a[r][0], x, meta[r][quarter / 2]);
#else
          mma_dense(acc[r][o], now.a[r][0], x[0], x[1]);
          mma_dense(acc[r][o], now.a[r][1], x[2], x[3]);
#endif
        }
        if (quarter < 3) {
#pragma unroll
          for (int r = 0; r < SLICES; ++r)
            if (r * OCTETS / SLICES == o)
              unpack_slice<asymmetric>(fragments[(quarter + 1) % 2], word, quarter + 1, r, stage, p);
        }
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) portable(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int warp_n = warp % WARPS_N, warp_m = warp / WARPS_N % WARPS_M, warp_k = warp / (WARPS_N * WARPS_M);
  const int gq = lane / 4, t = lane % 4;

  // Which tile of y: groups of M_GROUP blocks along m stay together while n goes by, so that they share W in the L2.
  const int group_size = M_GROUP * p.n_blocks;
  const int group_m = blockIdx.x / group_size * M_GROUP, in_group = blockIdx.x % group_size;
  const int group_rows = min(M_GROUP, p.m_blocks - group_m);
  const int m0 = (group_m + in_group % group_rows) * BLOCK_M;
  const int block_n = in_group / group_rows;

  // Which part of k, in k tiles.
  const int split = blockIdx.y;
  const int k_begin = static_cast<int>(static_cast<i64>(p.k_tiles) * split / p.splits);
  const int k_end = static_cast<int>(static_cast<i64>(p.k_tiles) * (split + 1) / p.splits);

  // Stages of shared memory: [n tile][k tile] of the stream, then [k tile][token] of x.
  const int w_tile_stride = WARPS_K * p.tile_bytes;
  const u32 w_stage = N_TILES * w_tile_stride, stage_bytes = w_stage + WARPS_K * X_TILE;
  const u32 ring = shared_address(shared), ring_end = ring + STAGES * stage_bytes;

  // Fetching W: each group of COPIERS threads has one n tile, whose k tiles follow one another in memory. Past the
  // last n tile the last one is fetched again, so that what is multiplied (and thrown away) is a legal weight.
  const int copier = thread % COPIERS, my_tile = thread / COPIERS;
  const int n_tile = min(block_n * N_TILES + my_tile, p.n_tiles - 1);
  const u8* w_from = p.stream + (static_cast<i64>(n_tile) * p.k_tiles + k_begin) * p.tile_bytes + copier * 16;
  const u32 w_to = my_tile * w_tile_stride + copier * 16;

  // Fetching x: the 16-byte pieces of a stage go round the threads in order, so a thread keeps its piece of the row
  // and its rows are X_ROUND_ROWS apart. Piece c of a row lies at c ^ (row % 8), free of bank conflicts.
  const int piece = thread % 16, x_row = thread / 16 % BLOCK_M, x_k_tile = thread / 16 / BLOCK_M;
  const u8* x_from = p.x + (m0 + x_row) * p.x_row_bytes + static_cast<i64>(k_begin + x_k_tile) * X_ROW + piece * 16;
  const u32 x_to = w_stage + thread / 16 * X_ROW + (piece ^ x_row % 8) * 16;
  const int rows_left = p.m - m0 - x_row;
  int k_left = p.k - (k_begin + x_k_tile) * TILE_K - piece * 8;

  auto fetch = [&](u32 stage, int k_tile0) {
    const int pieces = min(WARPS_K, k_end - k_tile0) * p.tile_bytes / 16;
#pragma unroll
    for (int i = 0; i < W_ROUNDS; ++i)
      if (copier + i * COPIERS < pieces) copy_async(stage + w_to + i * COPIERS * 16, w_from + i * COPIERS * 16);
    w_from += w_tile_stride;
#pragma unroll
    for (int i = 0; i < X_ROUNDS; ++i) {
      const int row = i * X_ROUND_ROWS % BLOCK_M, k_tile = i * X_ROUND_ROWS / BLOCK_M;
      if (row < rows_left)
        copy_async(stage + x_to + i * THREADS * 16, x_from + row * p.x_row_bytes + k_tile * X_ROW,
                   k_tile * TILE_K < k_left ? 16 : 0);
    }
    x_from += WARPS_K * X_ROW;
    k_left -= WARPS_K * TILE_K;
  };

  // Tokens past the last one: no stage ever fetches them, so they are zero from here on.
  if (m0 + BLOCK_M > p.m) {
#pragma unroll
    for (int i = 0; i < X_ROUNDS; ++i)
      if (i * X_ROUND_ROWS % BLOCK_M >= rows_left)
#pragma unroll 1
        for (u32 stage = 0; stage < STAGES * stage_bytes; stage += stage_bytes)
          *reinterpret_cast<uint4*>(shared + stage + x_to + i * THREADS * 16) = make_uint4(0, 0, 0, 0);
  }

  Warp mine;
  const int slice0 = warp_n * SLICES, rows_tile = slice0 / 4 * w_tile_stride + warp_k * p.tile_bytes;
  mine.codes = rows_tile + slice0 % 4 * CODE_WARP_BYTES + (Warp::WORD_BY_WORD ? lane * 4 : code_offset(lane));
  mine.metadata = rows_tile + CODE_BYTES + slice0 % 4 * META_WARP_BYTES + lane * 8;
  mine.scales = rows_tile + SCALE_OFFSET + slice0 % 4 * (SCALE_ROW_BYTES / 4) + gq * 4;
  // Lane l names row l % 8, piece l / 8 of a 32-k step; 64 bytes further is the next step, but for the swizzle's
  // third bit.
  mine.x_even = w_stage + warp_k * X_TILE + (warp_m * TOKENS + lane % 8) * X_ROW + ((lane / 8) ^ (lane % 8)) * 16;
  mine.x_odd = mine.x_even ^ 64;

  float acc[SLICES][OCTETS][4] = {};
  u32 into = ring;
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; ++s) {
    if (k_begin + s * WARPS_K < k_end) fetch(into, k_begin + s * WARPS_K);
    copy_commit();
    into += stage_bytes;
  }
  u32 from = ring;
  const bool asymmetric = BITS != 16 && p.zero_offset != 0;
#pragma unroll 1
  for (int k_tile0 = k_begin; k_tile0 < k_end; k_tile0 += WARPS_K) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    const int next = k_tile0 + (STAGES - 1) * WARPS_K;
    if (next < k_end) fetch(into, next);
    copy_commit();
    if (k_tile0 + warp_k < k_end) {
      if (asymmetric) mine.multiply<true>(acc, from, p);
      else mine.multiply<false>(acc, from, p);
    }
    into = into + stage_bytes == ring_end ? ring : into + stage_bytes;
    from = from + stage_bytes == ring_end ? ring : from + stage_bytes;
  }
  copy_wait<0>();

  // Sums of the layers along k, in order of layer.
  constexpr int HOLDERS = 32 * WARPS_N * WARPS_M;  // threads of one layer
  if constexpr (WARPS_K > 1) {
    float4* sums = reinterpret_cast<float4*>(shared);
    __syncthreads();
    const int holder = thread % HOLDERS;
    if (warp_k > 0) {
#pragma unroll
      for (int r = 0; r < SLICES; ++r)
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) {
          const float(&c)[4] = acc[r][o];
          sums[((warp_k - 1) * SLICES * OCTETS + r * OCTETS + o) * HOLDERS + holder] =
              make_float4(c[0], c[1], c[2], c[3]);
        }
    }
    __syncthreads();
    if (warp_k == 0) {
#pragma unroll
      for (int layer = 0; layer < WARPS_K - 1; ++layer)
#pragma unroll
        for (int r = 0; r < SLICES; ++r)
#pragma unroll
          for (int o = 0; o < OCTETS; ++o) {
            const float4 c = sums[(layer * SLICES * OCTETS + r * OCTETS + o) * HOLDERS + holder];
            acc[r][o][0] += c.x;
            acc[r][o][1] += c.y;
            acc[r][o][2] += c.z;
            acc[r][o][3] += c.w;
          }
    }
  }

  // Sums of the splits. The last one waits for the others, which the hardware has started before it: they have lower
  // block numbers. It leaves the flags cleared; no call before has used this ticket.
  if (p.splits > 1) {
    const int others = p.splits - 1;
    float4* partial = p.partial + static_cast<i64>(blockIdx.x) * others * (SLICES * OCTETS * HOLDERS);
    u64* arrived = p.arrived + static_cast<i64>(blockIdx.x) * others;
    if (split < others) {
      if (warp_k == 0) {
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
      return;
    }
    for (int s = thread; s < others; s += THREADS) {
      while (load_acquire(arrived + s) != p.ticket) __nanosleep(20);
      arrived[s] = 0;
    }
    __syncthreads();
    if (warp_k == 0) {
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
  if (warp_k > 0) return;

  // A lane holds rows gq and gq + 8 for tokens 2t, 2t + 1; the transposed fragment holds rows 2t, 2t + 1 (and + 8) of
  // token gq, neighbours in y.
#pragma unroll
  for (int r = 0; r < SLICES; ++r) {
    const int row0 = block_n * BLOCK_N + (slice0 + r) * 16;
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
      const int token = m0 + warp_m * TOKENS + o * 8 + gq;
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
