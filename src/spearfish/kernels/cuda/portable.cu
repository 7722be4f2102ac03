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
// Macros besides those of portable.cuh: STAGES, MIN_BLOCKS.

#include "portable.cuh"

constexpr int X_ROUNDS = WARPS_K * X_TILE / 16 / THREADS;  // 16-byte pieces of x in a stage, for each thread
constexpr int X_ROUND_ROWS = THREADS / 16;             // tokens (or tokens of several k tiles) fetched in a round

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
  const int gq = lane / 4;

  const Place place = find_place(p);
  const int m0 = place.m0, k_begin = place.k_begin, k_end = place.k_end;

  // Stages of shared memory: [n tile][k tile] of the stream, then [k tile][token] of x.
  const int w_tile_stride = WARPS_K * p.tile_bytes;
  const u32 w_stage = N_TILES * w_tile_stride, stage_bytes = w_stage + WARPS_K * X_TILE;
  const u32 ring = shared_address(shared), ring_end = ring + STAGES * stage_bytes;

  // Fetching W: each group of COPIERS threads has one n tile, whose k tiles follow one another in memory. Past the
  // last n tile the last one is fetched again, so that what is multiplied (and thrown away) is a legal weight.
  const int copier = thread % COPIERS, my_tile = thread / COPIERS;
  const int n_tile = min(place.block_n * N_TILES + my_tile, p.n_tiles - 1);
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

  if (add_splits(acc, p) && thread < HOLDERS) store_sums(acc, slice0, warp_m * TOKENS, p);
}
