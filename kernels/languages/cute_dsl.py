"""CUTLASS's CuTe, Python (CuTe DSL)

needs: nvidia-cutlass-dsl
runs: GPU
dtypes: fp16 bf16
D: 64 128
"""

import functools

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warp

LOG2_E = 1.4426950408889634
TILES = {64: (128, 64, 4), 128: (128, 64, 4)}  # D: queries and keys of a tile, warps
TYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}


# [region: copy]
@cute.jit
def load(
    copy: cute.TiledCopy,
    source: cute.Tensor,
    target: cute.Tensor,
    at: cute.Tensor,
    rows: Int32,
    EDGE: cutlass.Constexpr = True,
):
    """A tile of rows from global memory, at the EDGE zeros for those past the end; the copy is asynchronous."""
    if const_expr(not EDGE):
        cute.copy(copy, source, target)
    else:
        for r in range_constexpr(cute.size(target, mode=[1])):
            if at[0, r, 0][0] < rows:
                cute.copy(copy, source[None, r, None], target[None, r, None])
            else:
                target[None, r, None].fill(0)


# [end: copy]


def by_row(x: cute.Tensor) -> cute.Tensor:
    """A fragment of the products as (row, column), whatever the atom's order: ((column pair, row pair), M, N)."""
    shape, stride = x.layout.shape, x.layout.stride
    rows = ((shape[0][1], shape[1]), (shape[0][0], shape[2]))
    steps = ((stride[0][1], stride[1]), (stride[0][0], stride[2]))
    return cute.make_tensor(x.iterator, cute.make_layout(rows, stride=steps))


# [region: softmax]
@cute.jit
def online_softmax(
    S: cute.Tensor,
    O: cute.Tensor,
    at: cute.Tensor,
    m: cute.Tensor,
    l: cute.Tensor,
    r: cutlass.Constexpr,
    sees: Int32,
    scale_log2: Float32,
    MASK: cutlass.Constexpr,
):
    """Row r of S becomes a row of P, and what was summed before is rescaled. at: the key of each element; key `sees` is hidden."""
    if const_expr(MASK):
        for c in range_constexpr(cute.size(S)):
            S[c] = cutlass.select_(at[c][1] < sees, S[c], -Float32.inf)
    most = S[0]
    for c in range_constexpr(1, cute.size(S)):
        most = cute.arch.fmax(most, S[c])
    most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, 1))
    most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, 2))
    m_new = cute.arch.fmax(m[r], most * scale_log2)
    base = m_new
    if const_expr(MASK):
        base = cutlass.select_(m_new == -Float32.inf, Float32(0), m_new)  # a row that has seen no key yet
    alpha = cute.math.exp2(m[r] - base, fastmath=True)
    m[r] = m_new
    total = l[r] * alpha
    for c in range_constexpr(cute.size(S)):
        S[c] = cute.math.exp2(S[c] * scale_log2 - base, fastmath=True)
        total += S[c]
    l[r] = total
    for c in range_constexpr(cute.size(O)):
        O[c] = O[c] * alpha


# [end: softmax]


# [region: kernel]
@cute.kernel
def kernel(q, k, v, o, lse, scale_log2: Float32, sizes: cutlass.Constexpr, copy, mma, CAUSAL: cutlass.Constexpr):
    """Br queries of one head: q, o (Nq,D,BH), k, v (Nk,D,BH), lse (Nq,BH). sizes: Br, Bc, D."""
    Br, Bc, D = sizes
    T = q.element_type
    t, _, _ = cute.arch.thread_idx()
    block, head, _ = cute.arch.block_idx()
    tile = cute.arch.grid_dim()[0] - 1 - block  # the longest first, where the mask is causal
    Nq, Nk, i = q.shape[0], k.shape[0], tile * Br

    rows = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout((8, 64), stride=(64, 1)))
    layouts = [cute.tile_to_shape(rows, (n, D), (0, 1)) for n in (Br, Bc, Bc)]
    memory = cutlass.utils.SmemAllocator()
    sQ, sK, sV = (memory.allocate_tensor(T, x.outer, 1024, x.inner) for x in layouts)
    sVt = cute.composition(sV, cute.make_layout((D, Bc), stride=(Bc, 1)))
    gQ = cute.local_tile(q[None, None, head], (Br, D), (tile, 0))
    gK = cute.local_tile(k[None, None, head], (Bc, D), (None, 0))
    gV = cute.local_tile(v[None, None, head], (Bc, D), (None, 0))

    mine = copy.get_slice(t)
    tKg, tKs, tVg, tVs = mine.partition_S(gK), mine.partition_D(sK), mine.partition_S(gV), mine.partition_D(sV)
    at_Q = mine.partition_S(cute.make_identity_tensor((Br, D)))
    at_K = mine.partition_S(cute.make_identity_tensor((Bc, D)))

    slice = mma.get_slice(t)
    rQ = slice.make_fragment_A(slice.partition_A(sQ))
    rK = slice.make_fragment_B(slice.partition_B(sK))
    rV = slice.make_fragment_B(slice.partition_B(sVt))
    S = cute.make_rmem_tensor(slice.partition_shape_C((Br, Bc)), Float32)
    O = cute.make_rmem_tensor(slice.partition_shape_C((Br, D)), Float32)
    by_rows = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), T)
    by_columns = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), T)
    load_Q, load_K = cute.make_tiled_copy_A(by_rows, mma), cute.make_tiled_copy_B(by_rows, mma)
    load_V = cute.make_tiled_copy_B(by_columns, mma)
    cQ, cK = load_Q.get_slice(t).partition_S(sQ), load_K.get_slice(t).partition_S(sK)
    cV = load_V.get_slice(t).partition_S(sVt)
    vQ, vK = load_Q.get_slice(t).retile(rQ), load_K.get_slice(t).retile(rK)
    vV = load_V.get_slice(t).retile(rV)

    shift = Nk - Nq  # query n sees the keys up to n + shift
    end, whole = Nk, Nk // Bc  # tiles before `whole` need no mask
    if const_expr(CAUSAL):
        end = cutlass.max(0, cutlass.min(Nk, i + Br + shift))
        whole = cutlass.max(0, cutlass.min(Nk, i + 1 + shift)) // Bc
    tiles = (end + Bc - 1) // Bc
    load(copy, mine.partition_S(gQ), mine.partition_D(sQ), at_Q, Nq - i)
    if tiles > 0:
        load(copy, tKg[None, None, None, 0], tKs, at_K, Nk)
    cute.arch.cp_async_commit_group()

    scores, sums = by_row(S), by_row(O)
    at = by_row(slice.partition_C(cute.make_identity_tensor((Br, Bc))))
    at_O = by_row(slice.partition_C(cute.make_identity_tensor((Br, D))))
    count = const_expr(cute.size(scores, mode=[0]))  # query rows of a thread
    m, l = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
    m.fill(-Float32.inf)
    l.fill(0.0)
    O.fill(0.0)
    P = cute.make_fragment_like(S, T)
    halves = cute.logical_divide(P.layout, (None, None, 2))  # C of two atoms side by side is A of one
    shape, stride = halves.shape, halves.stride
    as_A = cute.make_layout(
        ((shape[0], shape[2][0]), shape[1], shape[2][1]), stride=((stride[0], stride[2][0]), stride[1], stride[2][1])
    )
    rP = cute.make_tensor(P.iterator, as_A)

    for MASK in range_constexpr(2):  # the loop over tiles twice: those that need no mask, then those that do
        for n in range(whole if const_expr(MASK) else 0, tiles if const_expr(MASK) else whole):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()  # K is there, and everyone has multiplied by the V before
            load(copy, tVg[None, None, None, n], tVs, at_K, Nk - n * Bc, MASK)
            cute.arch.cp_async_commit_group()
            S.fill(0.0)
            for x in range_constexpr(cute.size(rQ, mode=[2])):
                cute.copy(load_Q, cQ[None, None, x], vQ[None, None, x])
                cute.copy(load_K, cK[None, None, x], vK[None, None, x])
                cute.gemm(mma, S, rQ[None, None, x], rK[None, None, x], S)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()  # V is there, and everyone has read K
            if n + 1 < tiles:
                load(copy, tKg[None, None, None, n + 1], tKs, at_K, Nk - (n + 1) * Bc)
            cute.arch.cp_async_commit_group()
            for r in range_constexpr(count):
                sees = Nk - n * Bc
                if const_expr(CAUSAL):
                    sees = cutlass.min(sees, i + at[r, 0][0] + shift + 1 - n * Bc)
                online_softmax(scores[r, None], sums[r, None], at[r, None], m, l, r, sees, scale_log2, MASK)
            P.store(S.load().to(T))
            for x in range_constexpr(cute.size(rP, mode=[2])):
                cute.copy(load_V, cV[None, None, x], vV[None, None, x])
                cute.gemm(mma, O, rP[None, None, x], rV[None, None, x], O)

    for r in range_constexpr(count):
        total = l[r]
        total += cute.arch.shuffle_sync_bfly(total, 1)
        total += cute.arch.shuffle_sync_bfly(total, 2)
        row = i + at[r, 0][0]
        if row < Nq:
            by = Float32(0) if total == 0.0 else 1.0 / total
            for c in range_constexpr(cute.size(sums, mode=[1])):
                o[row, at_O[r, c][1], head] = (sums[r, c] * by).to(T)
            if t % 4 == 0:
                lse[row, head] = (m[r] + cute.math.log2(total)) / LOG2_E


# [end: kernel]


# [region: launch]
@cute.jit
def launch(
    q: cute.Pointer,
    k: cute.Pointer,
    v: cute.Pointer,
    o: cute.Pointer,
    lse: cute.Pointer,
    BH: Int32,
    Nq: Int32,
    Nk: Int32,
    scale_log2: Float32,
    stream: cuda.CUstream,
    D: cutlass.Constexpr,
    CAUSAL: cutlass.Constexpr,
    tile: cutlass.Constexpr,
):
    """q, o (BH,Nq,D), k, v (BH,Nk,D), lse (BH,Nq), dense."""
    Br, Bc, warps = tile

    def heads(x, N):
        return cute.make_tensor(x, cute.make_layout((N, D, BH), stride=(D, 1, cute.assume(N * D, divby=64))))

    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), q.dtype, num_bits_per_copy=128
    )
    copy = cute.make_tiled_copy_tv(atom, cute.make_layout((4 * warps, 8), stride=(8, 1)), cute.make_layout((1, 8)))
    product = warp.MmaF16BF16Op(q.dtype, Float32, (16, 8, 16))
    mma = cute.make_tiled_mma(product, (warps, 1, 1), permutation_mnk=(16 * warps, 16, 16))
    lses = cute.make_tensor(lse, cute.make_layout((Nq, BH), stride=(1, Nq)))
    kernel(
        heads(q, Nq), heads(k, Nk), heads(v, Nk), heads(o, Nq), lses, scale_log2, (Br, Bc, D), copy, mma, CAUSAL
    ).launch(grid=(cute.ceil_div(Nq, Br), BH, 1), block=(32 * warps, 1, 1), stream=stream)


def pointer(dtype, address):
    """An address on the GPU with its type; tensors are made of it in `launch`."""
    return cute.runtime.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)


@functools.lru_cache
def compiled(dtype, D, causal, tile):
    """The machine code for one type, head dimension, mask and tile; lengths are arguments."""
    T = TYPES[dtype]
    args = [pointer(x, 16) for x in (T, T, T, T, Float32)]
    return cute.compile(launch, *args, Int32(1), Int32(1), Int32(1), Float32(1), cuda.CUstream(0), D, causal, tile)


def forward(q, k, v, scale=None, causal=False):
    """O (B,H,Nq,D) in q's dtype and LSE (B,H,Nq) in float32."""
    (B, H, Nq, D), Nk = q.shape, k.shape[2]
    scale = D**-0.5 if scale is None else scale
    if scale <= 0:  # the maximum is taken before S is scaled, and a masked score is -inf before and after
        q, scale = -q if scale else torch.zeros_like(q), -scale or 1.0
    o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(B, H, Nq, device=q.device)
    heads = [x.contiguous() for x in (q, k, v)]
    at = [pointer(TYPES[q.dtype], x.data_ptr()) for x in (*heads, o)] + [pointer(Float32, lse.data_ptr())]
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    compiled(q.dtype, D, bool(causal), TILES[D])(*at, B * H, Nq, Nk, scale * LOG2_E, stream)
    return o, lse


# [end: launch]
