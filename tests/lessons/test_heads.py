"""Heads of trained models: taken from the model as it computes, stored, and the same scores again at any head dimension."""

import json

import pandas as pd
import pytest
import torch
from torch import nn

from helpers import gpt, record, train
from helpers.commands import record as command
from helpers.lessons import heads
from helpers.run import families
from helpers.run.families import peakedness

TINY = gpt.Size(layers=2, heads=4, kv_heads=2, context=64)


def test_stored_heads_are_as_peaked_as_the_record_says():
    arrays, about = record.load_heads("rxnmapper")
    table = pd.read_csv(record.DATA / "heads" / "rxnmapper.csv")
    assert arrays["q"].shape == arrays["k"].shape == arrays["v"].shape == (heads.STORED, 512, 32)
    assert arrays["q"].dtype == "float16" and about["reproduced"] > 0.9 and not about["causal"]
    q, k = (torch.from_numpy(arrays[part])[None] for part in "qk")
    for i, (layer, head) in enumerate(about["heads"]):
        rows = table[(table["layer"] == layer) & (table["head"] == head)]
        found = peakedness(q[:, i : i + 1], k[:, i : i + 1], bounds=heads.BOUNDS)
        assert found.keys == pytest.approx(rows["keys"].iloc[0], rel=0.01)
        shares = rows.set_index(["R", "Bc", "bound"])["share"].to_dict()
        assert found.rises == pytest.approx(shares, abs=0.01)
    assert len(table.drop_duplicates(["layer", "head"])) == 96 and table["keys"].min() < 1.6


@pytest.mark.parametrize("D", [32, 64, 128])
def test_scores_are_the_same_at_any_head_dimension(D):
    family = families.real()["heads of rxnmapper"]
    arrays, _ = record.load_heads("rxnmapper")
    stored = {part: torch.from_numpy(x).float() for part, x in arrays.items()}
    q, k, v = family.inputs((2, 6, 512, 512, D), "fp32")
    got = q[1, 5] @ k[1, 5].T * D**-0.5
    torch.testing.assert_close(got, stored["q"][1] @ stored["k"][1].T * 32**-0.5, rtol=1e-4, atol=1e-4)
    assert torch.equal(v[0, 0, :, -32:], stored["v"][(D // 32 - 1) % 4])
    q, k, _ = family.inputs((1, 4, 600, 520, D), "fp32", Hkv=2)
    assert torch.equal(q[0, 0, 512:], q[0, 0, :88]) and torch.equal(k[0, 1, 512:], k[0, 1, :8])
    got = q[0, 3, :512] @ k[0, 1, :512].T * D**-0.5  # heads 2 and 3 share the second
    torch.testing.assert_close(got, stored["q"][1] @ stored["k"][1].T * 32**-0.5, rtol=1e-4, atol=1e-4)
    if D == 32:
        with pytest.raises(ValueError, match="heads of D = 32 can't be those of D = 48"):
            family.inputs((1, 1, 8, 8, 48))


def test_a_models_heads_are_those_it_computes_with():
    torch.manual_seed(0)
    model = gpt.GPT(TINY, kept := gpt.sdpa())
    plan = train.Plan(TINY, length=32, batch=2, steps=1, rate=1e-3, dtype=torch.bfloat16)
    layers, about = heads.trained_gpt(model, plan, 48)
    assert model.attention is kept and about["causal"] and "first 48 bytes" in about["input"]
    assert [tuple(x.shape for x in layer) for layer in layers] == [((1, 4, 48, 64), (1, 2, 48, 64), (1, 2, 48, 64))] * 2
    block = model.blocks[0]
    seen = []
    hook = block.out.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    unseen = train.split(train.manual())[1]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(unseen[None, :48])
    hook.remove()
    q, k, v = (x.bfloat16() for x in layers[0])
    o = kept.whole(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(o, seen[0])


def test_the_stored_heads_go_from_the_most_to_the_least_peaked(tmp_path):
    torch.manual_seed(0)
    k = torch.randn(1, 2, 40, 64)
    layers = [(torch.randn(1, 4, 40, 64) * factor, k, k + factor) for factor in (4.0, 0.5, 9.0)]
    paths = heads.save("x", layers, {"model": "m", "source": "s", "causal": True}, root=tmp_path)
    assert [p.name for p in paths] == ["x.npz", "x.csv", "x.json"]
    arrays, about = record.load_heads("x", tmp_path)
    assert about["heads"][0][0] == 2 and about["heads"][-1][0] == 1 and len(about["heads"]) == heads.STORED
    layer, head = about["heads"][1]
    torch.testing.assert_close(
        torch.from_numpy(arrays["q"][1]).float(), layers[layer][0][0, head], rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(
        torch.from_numpy(arrays["v"][1]).float(), layers[layer][2][0, head // 2], rtol=1e-3, atol=1e-3
    )
    family = families.real(tmp_path)["heads of x"]
    assert (family.N, family.causal, family.source) == (40, True, "s")
    assert set(families.every(tmp_path)) == {*families.FAMILIES, "heads of x"}
    with pytest.raises(LookupError, match="no heads of 'y' are recorded; there are those of x"):
        record.load_heads("y", tmp_path)
    assert families.real(tmp_path / "nothing") == {}


def test_a_head_is_measured_with_the_k_of_its_own_group():
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 40, 64), torch.randn(1, 2, 40, 64)
    found = heads.table([(q, k, k)], causal=False).drop_duplicates("head")["keys"]
    own = [peakedness(q[:, h : h + 1], k[:, g : g + 1], bounds=heads.BOUNDS).keys for h, g in enumerate((0, 0, 1, 1))]
    assert found.tolist() == pytest.approx(own)


def test_the_chosen_heads_reach_from_the_most_peaked_to_the_least():
    found = pd.DataFrame({"layer": [n % 3 for n in range(12)], "head": range(12), "keys": range(12, 0, -1)})
    assert [head for _, head in heads.chosen(found, 4)] == [11, 7, 4, 0]


def test_albert_is_a_transformer_whose_layers_share_their_weights():
    """Against PyTorch's encoder layer with the same weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, activation="gelu", batch_first=True).eval()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    weights = {}
    for i, part in enumerate(("query", "key", "value")):
        weights[f"{name}.attention.{part}.weight"] = layer.self_attn.in_proj_weight[64 * i : 64 * i + 64]
        weights[f"{name}.attention.{part}.bias"] = layer.self_attn.in_proj_bias[64 * i : 64 * i + 64]
    for ours, theirs in (
        ("attention.dense", layer.self_attn.out_proj),
        ("attention.LayerNorm", layer.norm1),
        ("ffn", layer.linear1),
        ("ffn_output", layer.linear2),
        ("full_layer_layer_norm", layer.norm2),
    ):
        weights |= {f"{name}.{ours}.{p}": getattr(theirs, p) for p in ("weight", "bias")}
    layer.norm1.eps = layer.norm2.eps = 1e-12
    first = "albert.embeddings"
    for part, rows in (("word", 11), ("position", 20), ("token_type", 2)):
        weights[f"{first}.{part}_embeddings.weight"] = torch.randn(rows, 32)
    shapes = {
        f"{first}.LayerNorm": (32,),
        "albert.encoder.embedding_hidden_mapping_in": (64, 32),
        "predictions.dense": (32, 64),
        "predictions.LayerNorm": (32,),
        "predictions.decoder": (11, 32),
    }
    for key, shape in shapes.items():
        weights |= {f"{key}.weight": torch.randn(shape), f"{key}.bias": torch.randn(shape[0])}
    weights["predictions.bias"] = torch.randn(11)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        layers, logits = heads.albert(weights, ids, heads=4, layers=3)
        x = sum(weights[f"{first}.{part}_embeddings.weight"][:9] for part in ("word", "position"))
        x = x + weights[f"{first}.token_type_embeddings.weight"][0]
        x = nn.functional.layer_norm(
            x, (32,), weights[f"{first}.LayerNorm.weight"], weights[f"{first}.LayerNorm.bias"], 1e-12
        )
        key = "albert.encoder.embedding_hidden_mapping_in"
        x = (x @ weights[f"{key}.weight"].T + weights[f"{key}.bias"])[None]
        for n in range(3):
            q = x @ weights[f"{name}.attention.query.weight"].T + weights[f"{name}.attention.query.bias"]
            torch.testing.assert_close(layers[n][0].transpose(1, 2).flatten(2), q, rtol=1e-3, atol=1e-3)
            x = layer(x)
    assert logits.shape == (1, 9, 11) and len(layers) == 3


def test_a_reaction_is_cut_into_the_longest_tokens():
    numbers = {token: i for i, token in enumerate(["[CLS]", "[SEP]", "C", "l", "Cl", "[nH]", ">>", ">"])}
    assert heads.tokens("CCl>>[nH]", numbers) == [0, 2, 4, 6, 5, 1]


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="on a GPU only"):
        heads.record_heads(["gpt"])

    def missing(name):
        raise heads.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(heads.importlib.metadata, "distribution", missing)
    with pytest.raises(LookupError, match="rxnmapper is not installed"):
        heads.record_heads(["rxnmapper"])
    with pytest.raises(ValueError, match="no model bert; there are gpt, rxnmapper"):
        command.heads(type("A", (), {"models": ["bert"]})())


def test_the_gpt_is_recorded_after_its_training(monkeypatch, tmp_path, capsys):
    from helpers import bench

    torch.manual_seed(0)
    run = train.Run(gpt.GPT(TINY, gpt.sdpa()), pd.DataFrame(), None, 2.5)
    plan = train.Plan(TINY, length=32, batch=2, steps=1, rate=1e-3)
    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(train, "train", lambda *args, **options: run)
    monkeypatch.setattr(train, "SMALL", plan)
    monkeypatch.setitem(heads.LENGTH, "gpt", 48)
    save = record.save_heads
    monkeypatch.setattr(record, "save_heads", lambda *args: save(*args, root=tmp_path))
    heads.record_heads(["gpt"])
    about = json.loads((tmp_path / "heads" / "gpt.json").read_text())
    assert about["held_out"] == 2.5 and "wrote gpt.npz" in capsys.readouterr().out
    assert families.real(tmp_path)["heads of gpt"].causal is True
