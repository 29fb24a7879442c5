"""The region task of the merge by which GPUs attend together, 50."""

from .task import Task

TASKS = (
    Task(
        "50.1",
        "merge",
        2,
        "Write the kernel `merge`: from (O, LSE) of two sets of keys those of both together.",
        (
            "const fa_merge_args a: the kernel's only parameter, see kernels/include/fa/merge.cuh",
            "block: threads = 256; grid: one thread for every width<A, R> columns (4; 8 where O_a and O have 16 bits) of the B*H*Nq rows, "
            "so d / width<A, R> neighbouring lanes to a row, and a few past the last row",
            "O_a, O_b, O (B,H,Nq,d) of the types A, B, R with strides a.O_a_stride[3], ..; LSE_a, LSE_b, LSE (B,H,Nq) fp32 with "
            "a.LSE_a_stride[2], .., their rows contiguous",
            "load_row<A>(x, a.O_a, at), store_row<R>(a.O, at, x): float x[width<A, R>] from or to element `at`; FA_INFINITY, "
            "fa::log2_e, fa::ln_2",
        ),
        (
            "template <int d, typename A, typename B, typename R> __global__ void merge(const fa_merge_args a) is defined",
            "LSE = ln(exp(LSE_a) + exp(LSE_b)), O = exp(LSE_a - LSE) O_a + exp(LSE_b - LSE) O_b, whatever the size of the LSE",
            "a part with LSE = -inf counts nothing; where both are -inf, O = 0 and LSE = -inf; nothing is ever NaN",
            "all of that in place, too: a.O may be a.O_a, and a.LSE may be a.LSE_a; threads past the last row read and write nothing",
        ),
        (
            "Row and column from blockIdx.x and threadIdx.x by / and %; b, h and n from the row. Each O and each LSE has strides of its own.",
            "m = fmaxf(lse_a, lse_b), and 0 instead where it is -inf. Weights exp(lse_a - m) and exp(lse_b - m), l their sum: "
            "O is divided by l, LSE = m + ln(l).",
            "In place, a lane may read LSE_a after another one has written LSE there. Let one lane of the row read both, "
            "__shfl_sync(0xffffffff, x, 0, d / width<A, R>) hand them on, and the same lane write.",
        ),
    ),
)
