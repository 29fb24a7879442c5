"""The GPT of notebook 24: its positions, its cache; our kernels and SDPA give it the same gradients and the same text; the record of
its training."""

import json
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
import torch
from conditions import CONDITIONS
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers import draw_training, gpt, load, record, rung, train
from helpers.figures.style import PEERS
from helpers.run.kernel import default_device
from helpers.run.op import backward_rung

DEVICE = load("20_causal_gqa", quiet=True).device
TINY = replace(
    train.TOY,
    size=gpt.Size(layers=1, heads=2, kv_heads=1, context=256),
    length=40,
    steps=2,
    prompts=(b"The for statement", b"A"),
    bytes=6,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small are multiplied before a second thread has woken up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = gpt.GPT(TINY.size, gpt.sdpa()).to(DEVICE)
    with torch.no_grad():
        made.head.weight *= 3  # a new model's logits are closer to each other than those of a trained one
    return made


def pieces(seed=0):
    return train.batches(train.split(train.manual())[0], TINY, seed)[0].to(DEVICE)


def gradient(model, attention):
    model.attention = attention
    model.zero_grad()
    train.loss(model, pieces(), TINY.dtype).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def q_and_k(N=8):
    torch.manual_seed(0)
    return torch.randn(2, 1, N, 2, gpt.D, device=DEVICE)


def scores(q, k, at_q, at_k):
    """Q K^T (1,2,N,N) of heads whose queries stand at positions at_q.. and whose keys stand at at_k.."""
    turns, N = gpt.turns(256).to(DEVICE), q.shape[1]
    q, k = gpt.rotate(q, turns[at_q : at_q + N]), gpt.rotate(k, turns[at_k : at_k + N])
    return torch.einsum("bnhd,bmhd->bhnm", q, k)


def test_scores_depend_on_the_difference_of_positions_only():
    q, k = q_and_k()
    here = scores(q, k, 20, 7)
    torch.testing.assert_close(scores(q, k, 220, 207), here, atol=1e-3, rtol=0)
    assert (scores(q, k, 220, 206) - here).abs().max() > 0.1
    # of row 3, 13 positions apart: Re of the sum over pairs j of q_j conj(k_j) e^(13 i theta_j)
    q, k = torch.view_as_complex(torch.stack((q, k))[:, 0, 3].double().unflatten(-1, (-1, 2))).cpu()
    theta = 10_000 ** (-torch.arange(gpt.D // 2, dtype=torch.float64) / (gpt.D // 2))
    expected = (q * k.conj() * torch.polar(torch.ones_like(theta), 13 * theta)).sum(-1).real
    torch.testing.assert_close(here[0, :, 3, 3].cpu().double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_turn_keeps_lengths_dtype_and_rows_that_a_kernel_can_read(dtype):
    x = q_and_k()[0].to(dtype)
    turned = gpt.rotate(x, gpt.turns(8).to(DEVICE))
    assert turned.dtype == dtype and torch.equal(turned[:, 0], x[:, 0])
    assert turned.stride(-1) == 1 and not any(step * x.element_size() % 16 for step in turned.stride()[:-1])
    lengths = turned.float().norm(dim=-1) / x.float().norm(dim=-1)
    assert (lengths - 1).abs().max() < 2 * torch.finfo(dtype).eps


rotate = gpt.rotate


def only_queries(x, turns):
    """A rotation that leaves out the keys, the last of the heads."""
    return torch.cat((rotate(x[:, :, :-1], turns), x[:, :, -1:]), 2)


def moved_apart(model):
    """By how much logits change when a text stands 100 positions further on."""
    tokens = pieces()[:, :-1]
    here = model(tokens)
    model.turns = gpt.turns(TINY.size.context + 100)[100:].to(DEVICE)
    return (model(tokens) - here).abs().max()


@torch.no_grad()
def test_a_text_means_the_same_wherever_it_stands(model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(gpt, "rotate", only_queries)
        wrong = moved_apart(model)
    model.turns = gpt.turns(TINY.size.context).to(DEVICE)
    assert moved_apart(model) < 1e-3 < 0.05 < wrong


@torch.no_grad()
@pytest.mark.filterwarnings("error")
def test_a_loss_in_float32_has_products_in_float32(model):
    """PyTorch's autocast knows no float32 on a CPU, and warns of it."""
    text = pieces()
    logits = model(text[:, :-1]).flatten(0, 1)
    assert train.loss(model, text, torch.float32) == cross_entropy(logits, text[:, 1:].flatten())
    assert train.loss(model, text, torch.float32) != train.loss(model, text, TINY.dtype)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:In C")  # there is no autocast to float32
@pytest.mark.parametrize("attention", [gpt.sdpa(), gpt.kernels()], ids=["sdpa", "kernels"])
def test_a_prompt_may_come_in_pieces(model, attention):
    """Several bytes at once against a cache that holds some already, of sequences of different lengths."""
    model.attention, dtype = attention, torch.float16
    tokens = pieces()[:2, :40]
    with torch.autocast(DEVICE, dtype):
        whole = model(tokens)
        cache = gpt.Cache(model.size, 2, dtype, DEVICE)
        model(tokens[:, :20], cache)
        cache.keep(torch.tensor([20, 13], dtype=torch.int32, device=DEVICE))
        more = torch.stack((tokens[0, 20:32], tokens[1, 13:25]))
        found = model(more, cache)
    expected = torch.stack((whole[0, 20:32], whole[1, 13:25]))
    assert (found - expected).abs().max() < 0.03 < (found - whole[:, :12]).abs().max()


def cache_apart(model):
    """By how much the logits of texts written with a cache, of several lengths at once, differ from those of each one whole."""
    prompts = [b"The for statement", b"A", b"It is"]
    tokens, logits = gpt.generate(model, prompts, 5, torch.float32)
    far = []
    for prompt, written, found in zip(prompts, tokens, logits, strict=True):
        text = torch.cat((torch.tensor(list(prompt), device=DEVICE), written))
        far.append((model(text[None])[0, len(prompt) - 1 : -1] - found).abs().max())
    return max(far)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:In C")  # there is no autocast to float32
def test_a_cache_gives_the_logits_of_the_whole_text(model, monkeypatch):
    assert cache_apart(model) < 1e-3
    wrong = {
        "a new byte is not turned": (gpt, "rotate", lambda x, turns: x if x.shape[1] == 1 else rotate(x, turns)),
        "every text counts from the longest prompt": (
            gpt.Cache,
            "positions",
            lambda self, N: self.lengths.amax() + torch.arange(N, device=DEVICE)[None],
        ),
    }
    for name, (owner, attribute, patched) in wrong.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, patched)
            assert cache_apart(model) > 0.01, name


def doubled(q, k, v):
    """A right forward pass with a wrong gradient: that of V is twice what it should be."""
    return gpt.kernels().whole(q, k, 2 * v - v.detach())


def test_gradients_are_those_of_sdpa(model):
    expected = gradient(model, gpt.sdpa())
    ways = {"kernels": gpt.kernels(), "wrong": replace(gpt.kernels(), whole=doubled)}
    if default_device(rung("32_ping_pong"))[0] == DEVICE:
        ways["for Hopper"] = gpt.kernels("32_ping_pong")
    apart = {
        name: ((gradient(model, attention) - expected).norm() / expected.norm()).item()
        for name, attention in ways.items()
    }
    wrong = apart.pop("wrong")
    assert max(apart.values()) < 0.01 < wrong, apart  # bf16: a rounding is worth 0.002 to 0.004


def test_our_ways_are_named_by_the_rungs_that_run(monkeypatch):
    assert [*train.ours("cpu")] == ["rungs 20 and 23"]
    monkeypatch.setattr(train, "cuda_refusal", lambda rung: "" if rung.arch == "sm_90a" else "it is for Hopper")
    assert [*train.ours("cuda")] == ["rungs 20 and 23", "rungs 32 and 33"]
    monkeypatch.setattr(train, "cuda_refusal", lambda rung: "this GPU is no Hopper")
    assert [*train.ours("cuda")] == ["rungs 20 and 23"]
    for stem in ("20_causal_gqa", "32_ping_pong"):
        back = backward_rung(TINY.dtype, gpt.D, stem, frozenset({"causal", "gqa"})).stem
        assert {stem, back} <= {*train.RUNGS}
        assert f"rungs {stem[:2]} and {back[:2]}" in ("rungs 20 and 23", "rungs 32 and 33")


def test_a_record_takes_turns_twice_on_every_way_of_ours(monkeypatch):
    monkeypatch.setattr(train, "cuda_refusal", lambda rung: "")
    once = ["SDPA FLASH", "rungs 20 and 23", "rungs 32 and 33"]
    assert [train.label(name, *run) for name, _, *run in train.ways("cuda")] == [
        *once,
        *(f"{name}, again" for name in once),
        "SDPA CUDNN",
        "SDPA FLASH, seed 1",
        *(f"{name}, as a graph" for name in [*once, "SDPA CUDNN"]),
    ]


def test_texts_are_those_of_sdpa(model):
    found = train.compare(model, TINY, gpt.kernels())
    assert len(found) == len(TINY.prompts) * TINY.bytes and found["kernels"].nunique() > 1
    assert (found["sdpa"] == found["kernels"]).all()
    assert (found["apart"] < 0.05).all() and (found["margin"] > 0).all()
    assert train.texts(found, TINY.prompts)[1].startswith("A")


def test_where_texts_part_nothing_is_compared_any_more(model):
    """A step with the wrong sign: the texts part, and only up to that place are there margins."""
    right = gpt.kernels()
    wrong = replace(right, step=lambda q, k, v, lengths: -right.step(q, k, v, lengths))
    found = train.compare(model, TINY, wrong)
    first = found[found["sdpa"] != found["kernels"]].groupby("prompt")["place"].min()
    assert len(first), "a wrong step was not seen"
    for prompt, place in first.items():
        rows = found[found["prompt"] == prompt].set_index("place")
        assert rows["margin"].notna().tolist() == [n <= place for n in rows.index]
        assert rows["apart"][1] > 0.05


def test_each_sequence_of_a_batch_writes_what_it_writes_alone(model):
    model.attention = gpt.kernels()
    together, _ = gpt.generate(model, TINY.prompts, TINY.bytes)
    for prompt, tokens in zip(TINY.prompts, together):
        alone, _ = gpt.generate(model, [prompt], TINY.bytes)
        assert torch.equal(alone[0], tokens)


def test_a_text_that_exceeds_the_context_is_refused(model):
    with pytest.raises(ValueError, match="a context has 1 to 256"):
        gpt.generate(model, [b"x" * 250], 10)
    with pytest.raises(ValueError, match="of \\[1, 0\\] bytes"):
        gpt.generate(model, [b"x", b""], 1)


def test_runs_differ_by_their_attention_only():
    losses = [train.train(gpt.sdpa(), replace(TINY, steps=1), DEVICE, seed).steps["loss"][0] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    seen, unseen = train.split(train.manual())
    assert 0.05 < len(unseen) / (len(seen) + len(unseen)) < 0.15


class Graph(TorchDispatchMode):
    """torch.cuda.CUDAGraph and torch.cuda.graph on a CPU: notes PyTorch's operations with their tensors, takes back what they wrote,
    and does the same again on a replay."""

    def __init__(self):
        super().__init__()
        self.calls, self.before = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for argument, x in zip(func._schema.arguments, args):
            if argument.is_write:
                self.before += [(t, t.clone()) for t in tree_leaves(x)]
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tree_leaves(found)))
        return found

    def __exit__(self, *error):
        super().__exit__(*error)
        with torch.no_grad():
            for x, was in reversed(self.before):
                x.copy_(was)

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, found in self.calls:
            for x, y in zip(found, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(x, torch.Tensor):
                    x.copy_(y)


@pytest.fixture
def graphs(monkeypatch):
    """Those of this file on a CPU, CUDA's on a GPU."""
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: graph)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)


def test_replays_of_a_captured_step_train_as_steps_do(graphs, monkeypatch):
    """Batches, the rate, the optimizer's count of steps: each replay has to see them as they are then."""
    plan, new, captured = replace(TINY, steps=8), train._new, train.captured
    losses = partial(train.train, gpt.kernels(), plan, DEVICE)
    expected = losses().steps["loss"]

    def apart():
        return (losses(graph=True).steps["loss"] - expected).abs().max()

    def rate_is_a_number(*args):
        model, optimizer = new(*args)
        optimizer.param_groups[0]["lr"] = plan.rate
        return model, optimizer

    def always_the_first_batch(step, piece):
        replay = captured(step, piece)
        return lambda other: replay(piece)

    assert apart() <= (0 if DEVICE == "cpu" else 0.005)  # on a GPU dQ is added up in any order
    for name, wrong in (("_new", rate_is_a_number), ("captured", always_the_first_batch)):
        with monkeypatch.context() as patch:
            patch.setattr(train, name, wrong)
            assert apart() > 0.05, name


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    found, extra = train.tables(TINY, DEVICE)
    train.save(found, extra, known=CONDITIONS, root=root)
    return root, found


def test_a_record_reads_as_it_was_written(recorded):
    root, found = recorded
    for kind, frame in found.items():
        loaded = record.load(train.STEM, kind, "nvidia-h200", root)
        assert loaded.columns.tolist() == ["rung", "op", "device", "stale", *frame.columns]
        assert len(loaded) == len(frame) and not loaded["stale"].any()
        documented = (record.DATA / "README.md").read_text()
        assert f"| `{kind}`" in documented and all(f"`{column}`" in documented for column in frame.columns)
    about = record.about(train.STEM, "training", "nvidia-h200", root)
    assert about["rungs"] == list(train.RUNGS) and about["source"]["bytes"] == len(train.manual())
    assert about["plan"]["size"]["kv_heads"] == 1 and about["plan"]["dtype"] == "torch.bfloat16"


def test_a_record_is_stale_when_one_of_its_rungs_has_changed(recorded):
    root, _ = recorded
    path = root / "nvidia-h200" / f"{train.STEM}.runs.json"
    about = json.loads(path.read_text())
    assert not record.is_stale(about)
    assert record.is_stale(about | {"rungs": [*train.RUNGS[:2], "22_backward_fp32"]})
    assert about["digest"] != rung("20_causal_gqa").digest


def test_the_yardstick_and_the_speeds_are_those_of_a_made_up_record():
    rows = [
        ("SDPA FLASH", 0, 0, 0, 2.0, 10.0),
        ("rungs 20 and 23", 0, 0, 0, 2.1, 8.0),
        ("SDPA FLASH", 1, 0, 0, 3.0, 10.0),
        ("rungs 20 and 23", 0, 0, 1, 2.2, 5.0),
    ]
    steps = [(*row[:4], n, row[4], row[5] if n >= train.WARM_UP else 1e6) for row in rows for n in range(40)]
    training = pd.DataFrame(steps, columns=[*train.RUN, "step", "loss", "ms"])
    runs = pd.DataFrame([(*row[:4], 1000, 2**30, 2.5) for row in rows], columns=[*train.RUN, "tokens", "bytes", "held_out"])  # fmt: skip
    names = ["rungs 20 and 23", "SDPA FLASH, seed 1", "rungs 20 and 23, as a graph"]
    assert train.yardstick(training)["mean"].round(6).to_dict() == dict(zip(names, (0.1, 1.0, 0.2)))
    speeds = train.speeds(training, runs)
    assert speeds.index.tolist() == ["SDPA FLASH", *names]
    assert speeds["kilotokens_per_s"].tolist() == [100.0, 125.0, 100.0, 200.0]
    assert speeds["peak_gib"].tolist() == [1.0] * 4


def test_every_kernel_of_a_step_is_counted_to_the_part_that_its_name_says():
    names = {
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(Flash_fwd_params)": "attention, forward",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64": "attention, forward",
        "void causal_gqa<64, fa::bf16>(fa_model_args, Order)": "attention, forward",
        "void ping_pong<64, fa::bf16>(fa_model_args, Maps, Order)": "attention, forward",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true>(Flash_bwd_params)": "attention, backward",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64": "attention, backward",
        "void cudnn::fusion::compute_dot_do_o_specialized<true>(Params)": "attention, backward",
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)": "attention, backward",
        "void cudnn::fusion::fmha_reduce_head<true>(void const*, void*, unsigned int)": "attention, backward",
        "void backward_mma<64, fa::bf16>(fa_backward_args)": "attention, backward",
        "void backward_wgmma<64, fa::bf16>(Maps, fa_backward_args, int)": "attention, backward",
        "void prepare<64, fa::bf16>(fa_backward_args)": "attention, backward",
        "void finish<64, fa::bf16>(fa_backward_args)": "attention, backward",
        "void add_heads<64, fa::bf16>(fa_backward_args)": "attention, backward",
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "everything else",
        "void at::native::vectorized_layer_norm_kernel<float, float, false>(int)": "everything else",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)": "everything else",
    }
    made = pd.DataFrame([("kernels", name, 1.0, 2.0**n) for n, name in enumerate(names)], columns=["name", "kernel", "calls", "ms"])  # fmt: skip
    found = train.parts(made).loc["kernels"]
    for part in ("attention, forward", "attention, backward", "everything else"):
        assert found[part] == sum(2.0**n for n, which in enumerate(names.values()) if which == part)
    assert found["all"] == 2.0 ** len(names) - 1


@torch.no_grad()
def test_writing_step_by_step_writes_what_generate_does(model):
    """The step that is timed and captured, which leaves the cache's lengths where they are in memory."""
    prompts = [b"The for statement", b"A"]
    expected, _ = gpt.generate(model, prompts, 5)
    cache = gpt.Cache(model.size, 2, torch.float16, DEVICE)
    place, longest = cache.lengths.data_ptr(), max(map(len, prompts))
    padded = torch.tensor([list(p.ljust(longest, b"\0")) for p in prompts], device=DEVICE)
    with torch.autocast(DEVICE, torch.float16):
        logits = model(padded, cache)
    cache.keep(torch.tensor([len(p) for p in prompts], dtype=torch.int32, device=DEVICE))
    tokens = [torch.stack([logits[b, len(p) - 1].argmax(-1, keepdim=True) for b, p in enumerate(prompts)])]
    for _ in range(4):
        tokens.append(train._write(model, cache, torch.float16, tokens[-1]))
    assert torch.equal(torch.cat(tokens, 1), expected) and cache.lengths.data_ptr() == place


def test_every_way_to_write_is_timed():
    found = train.writing(TINY, DEVICE, rounds=2, steps=2, shapes=((1, 20), (3, 20)))
    assert len(found) == 2 * 2 * 2 * (2 if DEVICE == "cuda" else 1) and found["ms"].notna().all() == (DEVICE == "cuda")
    documented = (record.DATA / "README.md").read_text()
    assert "| `writing`" in documented and all(f"`{column}`" in documented for column in found.columns)
    made = pd.DataFrame(
        {"name": "SDPA", "graph": [0, 0, 1], "B": 4, "filled": 8, "round": [0, 1, 0], "ms": [2.0, 4.0, 1.0]}
    )
    speeds = train.writing_speeds(made)
    assert speeds.index.get_level_values("way").tolist() == ["SDPA", "SDPA, as a graph"]
    assert speeds.iloc[0].round(1).tolist() == [1333.3, 1000.0, 2000.0]


@pytest.mark.gpu
def test_a_profile_knows_every_way_of_attention():
    found = train.parts(train.profile(replace(train.SMALL, steps=4, length=512), steps=2))
    assert {"SDPA FLASH", *train.ours("cuda")} <= set(found.index) and (found > 0).all(axis=None)


def test_without_a_gpu_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="on a GPU only"):
        train.record_training()


def test_sdpa_flash_has_its_colour_of_every_figure():
    rows = [(name, 0, 0, 0, step, 1.0) for name in ("SDPA FLASH", "SDPA CUDNN") for step in range(2)]
    training = pd.DataFrame(rows, columns=["name", "seed", "round", "graph", "step", "loss"])
    left = draw_training.losses(training, "title").axes[0]
    assert {line.get_label(): line.get_color() for line in left.lines} == {
        name: PEERS[name][0] for name in ("SDPA FLASH", "SDPA CUDNN")
    }


def test_steps_past_the_right_edge_are_counted_there():
    ms = [1e6] * train.WARM_UP + [10 + n / 10 for n in range(99)] + [1000.0]
    training = pd.DataFrame({"name": "SDPA FLASH", "seed": 0, "round": 0, "graph": 0, "step": range(len(ms)), "ms": ms})
    figure = draw_training.waits(training, pd.Series({"SDPA FLASH": 8.0}), "title")
    assert [t.get_text() for t in figure.axes[0].texts] == ["+ 1"]


def test_a_lead_of_less_than_twice_the_difference_is_a_tie():
    text = pd.DataFrame({"margin": [1.5, 3.0], "apart": [1.0, 1.0]})
    assert "Of 2 bytes 1 lie below the line" in draw_training.margins(text, "title").in_words
