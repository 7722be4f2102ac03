// The same product for many tokens: symmetric 2:4 codes with at most one scale for each row of a k tile. What is
// multiplied, stored and added up is as in portable.cu; how a block is cut and what its warps wait for differs.
//
//            64 tokens
//     rows   +---------+
//     of n   | warp 0  |   WARPS_N warps of 64 rows each. All read the same x; the weights of a warp are its own.
//            +---------+
//            | warp 1  |   Every instruction that is not mma.sp costs the tensor cores more than a clock (facts.md has
//            +---------+   the measurement), so what counts is instructions for each mma.sp: a fragment of the weights
//            |  ...    |   is unpacked once for 64 tokens, scales are loaded once for a k tile, and nothing is done
//            +---------+   twice.
//
// The order of work does not stop at the end of a k tile: fragment i + 1 is unpacked and the x of the next 32 k is
// loaded while fragment i is multiplied, the first ones of the next k tile included. Warps meet once for each k tile,
// at an mbarrier at which they arrive one fragment before they wait; it says that what each fetched has come and that
// each is through with the stage that is filled next.
//
// Macros besides those of portable.cuh: STAGES, MIN_BLOCKS.

#include "portable.cuh"

static_assert(SPARSE && BITS != 16 && SLICES == 4 && WARPS_M == 1 && WARPS_K == 1, "what this kernel is made for");

constexpr int FRAGMENTS = 4 * SLICES;             // of a k tile: for each 32 k one of every 16 rows
constexpr int X_ROUNDS = X_TILE / 16 / THREADS;   // 16-byte pieces of x in a stage, for each thread
constexpr int X_ROUND_ROWS = THREADS / 16;        // tokens fetched in a round
constexpr int W_TILE_MAX = SCALE_OFFSET + SCALE_ROW_BYTES;
constexpr int W_FULL_ROUNDS = SCALE_OFFSET / 16 / COPIERS;  // rounds in which every copier has a piece of the n tile
constexpr int W_WIDE_ROUNDS = (W_TILE_MAX / 16 + COPIERS - 1) / COPIERS;
constexpr int W_BIAS = 2048;  // the pointer to what is fetched stands in its middle: offsets of copies have 12 bits

static_assert(X_ROUNDS * THREADS * 16 == X_TILE && X_ROUND_ROWS % 8 == 0, "x divides evenly among the threads");

// ------------------------------------------------------------------------------------------ meeting

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
#define TRY_WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define TRY_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
  asm volatile("{\n.reg .pred done;\nAGAIN:\n" TRY_WAIT " done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(barrier), "r"(parity)
               : "memory");
}

// ------------------------------------------------------------------------------------------ a warp's share

// A pair of one half of a word. Unlike both_low and both_high this is an operand's modifier to the compiler, not an
// instruction.
__device__ __forceinline__ u32 pair_of_low(u32 word) {
  u32 result;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}" : "=r"(result) : "r"(word));
  return result;
}
__device__ __forceinline__ u32 pair_of_high(u32 word) {
  u32 result;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}" : "=r"(result) : "r"(word));
  return result;
}

struct Warp {
  u32 codes, metadata, scales;  // byte offsets into a stage, this lane's place included
  u32 x_even, x_odd;            // and those of x, for even and odd quarters of a k tile (the swizzle differs)
  u32 word[SLICES][4], meta[SLICES][2], scale[SLICES];
  u32 a[2][4];       // fragments i and i + 1
  u32 b[OCTETS][4];  // x of a quarter

  // Ask for the codes of fragment i, if those of the last fragment of these rows do not lie in the same 16 bytes, and at
  // the beginning of a k tile for the metadata and scales of its rows.
  __device__ __forceinline__ void ask(int i, u32 stage, bool scaled) {
    const int r = i % SLICES, quarter = i / SLICES;
    if (quarter % CHUNK_STEPS == 0)
      load_shared(word[r], stage + codes + r * CODE_WARP_BYTES + quarter / CHUNK_STEPS * CHUNK_BYTES);
    if (quarter > 0) return;
    load_shared(meta[r], stage + metadata + r * META_WARP_BYTES);
    // Without scales in the stream the register keeps ones.
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.shared.u32 %0, [%1];\n}"
                 : "+r"(scale[r])
                 : "r"(stage + scales + r * (SCALE_ROW_BYTES / 4)), "r"(static_cast<u32>(scaled)));
  }

  // Register j of fragment i.
  template <int j>
  __device__ __forceinline__ void unpack_part(int i) {
    const int r = i % SLICES, quarter = i / SLICES;
    const RowPairScale pairs{pair_of_low(scale[r]), pair_of_high(scale[r]), SYMMETRIC_LOW, SYMMETRIC_HIGH};
    const int w = BITS == 4 ? quarter : quarter % 2 * 2 + j / 2;
    a[i % 2][j] = unpack_register<j>(word[r][w], pairs);
  }

  __device__ __forceinline__ void load_x(int quarter, int octet, u32 stage) {
    load_matrices(b[octet], stage + (quarter % 2 == 0 ? x_even : x_odd) + quarter / 2 * 128 + octet * 8 * X_ROW);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) portable_wide(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const Place place = find_place(p);

  // The meeting point, then stages of shared memory: the n tiles of the stream, then x.
  const u32 w_stage = N_TILES * p.tile_bytes, stage_bytes = w_stage + X_TILE;
  const u32 meeting = shared_address(shared), ring = meeting + 128, ring_end = ring + STAGES * stage_bytes;

  // Fetching W: as in portable.cu. A warp fetches the n tile that it multiplies.
  const int copier = thread % COPIERS, my_tile = thread / COPIERS;
  const int n_tile = min(place.block_n * N_TILES + my_tile, p.n_tiles - 1);
  const u8* w_from =
      p.stream + (static_cast<i64>(n_tile) * p.k_tiles + place.k_begin) * p.tile_bytes + copier * 16 + W_BIAS;
  const u32 w_to = my_tile * p.tile_bytes + copier * 16;
  const int w_pieces = p.tile_bytes / 16 - copier;

  // Fetching x: piece c of a row lies at c ^ (row % 8), free of bank conflicts. Tokens past the last one are not
  // fetched; what is multiplied in their stead is never stored.
  const int piece = thread % 16, x_row = thread / 16;
  const u8* x_from = p.x + (place.m0 + x_row) * p.x_row_bytes + static_cast<i64>(place.k_begin) * X_ROW + piece * 16;
  const u32 x_to = w_stage + x_row * X_ROW + (piece ^ x_row % 8) * 16;
  const i64 x_step = X_ROUND_ROWS * p.x_row_bytes;
  const int rows_left = p.m - place.m0 - x_row;
  int k_left = p.k - place.k_begin * TILE_K - piece * 8;

  auto fetch = [&](u32 stage) {
    const u32 to = stage + w_to;
#pragma unroll
    for (int i = 0; i < W_WIDE_ROUNDS; ++i)
      if (i < W_FULL_ROUNDS || i * COPIERS < w_pieces)
        copy_async(to + i * COPIERS * 16, w_from + i * COPIERS * 16 - W_BIAS);
    const u8* from = x_from;
#pragma unroll
    for (int i = 0; i < X_ROUNDS; ++i) {
      if (i * X_ROUND_ROWS < rows_left) copy_async(stage + x_to + i * THREADS * 16, from, k_left > 0 ? 16 : 0);
      from += x_step;
    }
    w_from += p.tile_bytes;
    x_from += X_ROW;
    k_left -= TILE_K;
  };

  Warp mine;
  mine.codes = warp * p.tile_bytes + lane * 16;
  mine.metadata = warp * p.tile_bytes + CODE_BYTES + lane * 8;
  mine.scales = warp * p.tile_bytes + SCALE_OFFSET + lane / 4 * 4;
  mine.x_even = w_stage + lane % 8 * X_ROW + ((lane / 8) ^ (lane % 8)) * 16;
  mine.x_odd = mine.x_even ^ 64;
#pragma unroll
  for (int r = 0; r < SLICES; ++r) mine.scale[r] = ONES;

  const int tiles = place.k_end - place.k_begin;
  const bool scaled = p.scale_rows != 0;
  if (thread == 0) barrier_init(meeting, WARPS * kArriving);
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < tiles) fetch(ring + s * stage_bytes);
    copy_commit();
  }
  copy_wait<STAGES - 2>();
  __syncthreads();

  float acc[SLICES][OCTETS][4] = {};
  u32 from = ring, before = ring_end - stage_bytes, parity = 0;
#pragma unroll
  for (int o = 0; o < OCTETS; ++o) mine.load_x(0, o, from);
  mine.ask(0, from, scaled);
  mine.ask(1, from, scaled);
  mine.unpack_part<0>(0);
  mine.unpack_part<1>(0);
  mine.unpack_part<2>(0);
  mine.unpack_part<3>(0);

#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    const u32 next = from + stage_bytes == ring_end ? ring : from + stage_bytes;
#pragma unroll
    for (int i = 0; i < FRAGMENTS; ++i) {
      const int r = i % SLICES, quarter = i / SLICES, after = (i + 1) % FRAGMENTS;
      // Into the stage that everybody was through with before this tile.
      if (i == 2 && t + STAGES - 1 < tiles) fetch(before);
      if (i == FRAGMENTS - 3) {
        copy_commit();
        copy_wait<STAGES - 2>();
        __syncwarp();
        if (lane < kArriving) barrier_arrive(meeting);
      }
      if (i == FRAGMENTS - 2) {
        barrier_wait(meeting, parity);
        parity ^= 1;
      }
      mine.ask((i + 2) % FRAGMENTS, i + 2 < FRAGMENTS ? from : next, scaled);
#pragma unroll
      for (int o = 0; o < OCTETS; ++o) {
        if (quarter % 2 == 0) mma_sparse<0>(acc[r][o], mine.a[i % 2], mine.b[o], mine.meta[r][quarter / 2]);
        else mma_sparse<1>(acc[r][o], mine.a[i % 2], mine.b[o], mine.meta[r][quarter / 2]);
        if (r == SLICES - 1) mine.load_x((quarter + 1) % 4, o, quarter < 3 ? from : next);
        if (o == 0) mine.unpack_part<0>(after);
        if (o == OCTETS / 4) mine.unpack_part<1>(after);
        if (o == OCTETS / 2) mine.unpack_part<2>(after);
        if (o == OCTETS / 4 * 3) mine.unpack_part<3>(after);
      }
    }
    before = from;
    from = next;
  }
  copy_wait<0>();

  if (add_splits(acc, p)) store_sums(acc, warp * SLICES, 0, p);
}
