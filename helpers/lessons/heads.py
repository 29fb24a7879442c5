"""Q, K and V of the heads of two trained models; `python -m helpers record heads` records them in data/heads/.

`gpt` is the model of notebook 24, trained on this machine's GPU: causal, rotary positions, D = 64. `rxnmapper` is the model in the
package of that name (Schwaller et al. 2021, doi 10.1126/sciadv.abe4166; MIT licence): an ALBERT that reads a chemical reaction
as text and has learned, untold, which atom of the product is which of the reactants: heads that look at one key of their
own. Its weights, 3 MB, are part of the package; it runs on any CPU.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from .. import record
from ..run.families import peakedness
from . import gpt, train

BOUNDS = (4.0, 8.0, 15.0, 30.0)  # log2 units by which a maximum has to rise
STORED = 4  # heads of a model: the most peaked, the least, and two between
LENGTH = {"gpt": 1024, "rxnmapper": 512}  # tokens; the second is as many as the model has positions for

# Reactions to read at once, reactants and products in SMILES: textbook syntheses of common drugs, 514 tokens.
REACTIONS = (
    ("OC(=O)c1ccccc1O.CC(=O)OC(C)=O", "CC(=O)Oc1ccccc1C(=O)O"),  # aspirin
    ("Nc1ccc(O)cc1.CC(=O)OC(C)=O", "CC(=O)Nc1ccc(O)cc1"),  # paracetamol
    ("CCN(CC)CC.CCN(CC)CCO.Nc1ccc(cc1)C(=O)Cl", "CCN(CC)CCOC(=O)c1ccc(N)cc1"),  # procaine
    ("CCNCC.Cc1cccc(C)c1NC(=O)CCl", "CCN(CC)CC(=O)Nc1c(C)cccc1C"),  # lidocaine
    ("CC(C)Cc1ccc(cc1)C(C)C(=O)O.CCO", "CCOC(=O)C(C)c1ccc(CC(C)C)cc1"),  # ibuprofen ethyl ester
    ("CC(C)NCC1CO1.Oc1cccc2ccccc12", "CC(C)NCC(O)COc1cccc2ccccc12"),  # propranolol
    (
        "CN1CCNCC1.O=C(O)c1cn(C2CC2)c2cc(Cl)c(F)cc2c1=O",
        "CN1CCN(CC1)c1cc2n(cc(C(=O)O)c(=O)c2cc1F)C1CC1",
    ),  # ciprofloxacin's
    ("CNCCC(Oc1ccc(cc1)C(F)(F)F)c1ccccc1.CC(=O)Cl", "CC(=O)N(C)CCC(Oc1ccc(cc1)C(F)(F)F)c1ccccc1"),  # fluoxetine's
)


def rxnmapper_weights() -> tuple[dict[str, Tensor], dict[str, int], str]:
    """The model's tensors by name, the number of each token, and the package's version. LookupError where it isn't installed."""
    try:
        package = importlib.metadata.distribution("rxnmapper")
    except importlib.metadata.PackageNotFoundError:
        raise LookupError(
            "rxnmapper is not installed: `pip install --no-deps rxnmapper` installs what is needed"
        ) from None
    files = {Path(file).name: package.locate_file(file) for file in package.files or () if "albert" in str(file)}
    weights = torch.load(files["pytorch_model.bin"], map_location="cpu", weights_only=True)
    tokens = Path(files["vocab.txt"]).read_text().splitlines()
    return weights, {token: i for i, token in enumerate(tokens)}, package.version


def tokens(text: str, numbers: dict[str, int]) -> list[int]:
    """A reaction as the model's tokens, the longest that fits first, between [CLS] and [SEP]."""
    found, at = [numbers["[CLS]"]], 0
    while at < len(text):
        length = next(n for n in range(min(12, len(text) - at), 0, -1) if text[at : at + n] in numbers)
        found.append(numbers[text[at : at + length]])
        at += length
    return [*found, numbers["[SEP]"]]


def albert(weights: dict[str, Tensor], ids: Tensor, heads: int = 8, layers: int = 12) -> tuple[list, Tensor]:
    """The forward pass of rxnmapper's ALBERT (Lan et al. 2020, arXiv 1909.11942), one layer's weights used `layers` times: q, k, v
    (1, heads, N, 32) of every layer, and the logits (1, N, tokens). ids (1, N)."""

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    def project(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    first, layer = "albert.embeddings", "albert.encoder.albert_layer_groups.0.albert_layers.0"
    x = weights[f"{first}.word_embeddings.weight"][ids]
    x = x + weights[f"{first}.position_embeddings.weight"][: ids.shape[1]]
    x = norm(x + weights[f"{first}.token_type_embeddings.weight"][0], f"{first}.LayerNorm")
    x = project(x, "albert.encoder.embedding_hidden_mapping_in")
    found = []
    for _ in range(layers):
        q, k, v = (
            project(x, f"{layer}.attention.{name}").unflatten(-1, (heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        found.append((q, k, v))
        o = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = norm(x + project(o, f"{layer}.attention.dense"), f"{layer}.attention.LayerNorm")
        inner = project(gelu(project(x, f"{layer}.ffn")), f"{layer}.ffn_output")
        x = norm(x + inner, f"{layer}.full_layer_layer_norm")
    x = norm(gelu(project(x, "predictions.dense")), "predictions.LayerNorm")
    return found, linear(x, weights["predictions.decoder.weight"], weights["predictions.bias"])


@torch.no_grad()
def rxnmapper() -> tuple[list, dict]:
    """q, k, v (1, 8, 512, 32) of each of the twelve layers for REACTIONS, and what a record says of them. LookupError without the
    package."""
    weights, numbers, version = rxnmapper_weights()
    text = ">>".join(".".join(side) for side in zip(*REACTIONS, strict=True))
    ids = torch.tensor([tokens(text, numbers)[: LENGTH["rxnmapper"]]])
    layers, logits = albert(weights, ids)
    right = (logits.argmax(-1) == ids).float().mean().item()
    return layers, {
        "model": "RXNMapper's ALBERT: 12 layers that share their weights, 8 heads, D = 32, not causal",
        "source": f"the Python package rxnmapper {version}, MIT licence; Schwaller et al. 2021, doi 10.1126/sciadv.abe4166",
        "input": f"{ids.shape[1]} tokens: {len(REACTIONS)} textbook reactions read at once",
        "reproduced": round(right, 3),  # share of its input's tokens that the model gives back: one has to be near 1
        "causal": False,
    }


@torch.no_grad()
def trained_gpt(model: gpt.GPT, plan: train.Plan, length: int) -> tuple[list, dict]:
    """q (1,H,length,64), k and v (1,Hkv,length,64) of each layer of a trained model for text that it hasn't seen, and what a record
    says of them."""
    layers: list = []
    inner = model.attention.whole

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers.append(tuple(x.detach().float().cpu() for x in (q, k, v)))
        return inner(q, k, v)

    _, unseen = train.split(train.manual())
    device = model.head.weight.device
    kept, model.attention = model.attention, gpt.Attention(whole, model.attention.step)
    with torch.autocast(device.type, plan.dtype):
        model(unseen[None, :length].to(device))
    model.attention = kept
    size = plan.size
    return layers, {
        "model": f"the GPT of notebook 24: {size.layers} layers, {size.heads} heads on {size.kv_heads} of K and V, D = 64, causal",
        "source": "trained by helpers/lessons/train.py on the reference manual of Python (PSF licence), "
        f"{plan.steps} steps of {plan.batch * plan.length} bytes",
        "input": f"the first {length} bytes of the text it was not trained on",
        "causal": True,
    }


def table(layers: Sequence[tuple[Tensor, Tensor, Tensor]], causal: bool) -> pd.DataFrame:
    """How peaked every head is, a row for each layer, head, R, Bc and bound: keys, top and share as `families.peakedness` has them."""
    rows = []
    for layer, (q, k, _) in enumerate(layers):
        group = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            own = peakedness(q[:, head : head + 1], k[:, head // group : head // group + 1], causal, bounds=BOUNDS)
            rows += [(layer, head, own.keys, own.top, *key, share) for key, share in own.rises.items()]
    return pd.DataFrame(rows, columns=["layer", "head", "keys", "top", "R", "Bc", "bound", "share"])


def chosen(found: pd.DataFrame, count: int = STORED) -> list[tuple[int, int]]:
    """(layer, head) of `count` heads, evenly spread from the most peaked to the least."""
    heads = found.drop_duplicates(["layer", "head"]).sort_values("keys", kind="stable")
    at = [round(i * (len(heads) - 1) / (count - 1)) for i in range(count)]
    return [(int(layer), int(head)) for layer, head in heads[["layer", "head"]].iloc[at].values]


def save(name: str, layers: Sequence[tuple[Tensor, Tensor, Tensor]], about: dict, **options: object) -> list[Path]:
    """Records a model's heads; options are those of record.save_heads."""
    found = table(layers, about["causal"])
    stored = chosen(found)
    parts = {"q": 0, "k": 1, "v": 2}
    arrays = {}
    for part, index in parts.items():
        group = layers[0][0].shape[1] // layers[0][index].shape[1]
        arrays[part] = torch.stack([layers[l][index][0, h // group] for l, h in stored]).half().numpy()
    return record.save_heads(name, arrays, found, about | {"heads": stored}, **options)


def record_heads(names: Sequence[str] = ("gpt", "rxnmapper")) -> None:
    """Records the heads of these models and prints how peaked they are. RuntimeError if `gpt` is asked for without a GPU, LookupError
    if rxnmapper is, and isn't installed."""
    for name in names:
        if name == "gpt":
            from ..measure.bench import require_gpu

            require_gpu()
            run = train.train(gpt.sdpa(SDPBackend.FLASH_ATTENTION), train.SMALL, "cuda", graph=True)
            layers, about = trained_gpt(run.model, train.SMALL, LENGTH[name])
            about |= {"held_out": round(run.held_out, 4), "torch": torch.__version__}
        else:
            layers, about = rxnmapper()
        paths = save(name, layers, about)
        for path in paths:
            print("wrote", path.name, f"({path.stat().st_size >> 10} KB)")
        heads = pd.read_csv(paths[1]).drop_duplicates(["layer", "head"])
        print(heads.pivot(index="layer", columns="head", values="keys").round(1).to_string())
