"""Cases of the KDA, MoE and AttnRes kernels, for `kernels.py`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from baselines import chunked_recurrence
from kernel_session import Arrays, Case, Kernel, as_torch, bf16, i32

HIDDEN, HEADS, WIDTH, RANK = 2048, 16, 128, 128
CHANNELS = HEADS * WIDTH
EXPERTS, TOP_K, LATENT, INTERMEDIATE = 32, 4, 1024, 1024
EPS = 1e-5


# ---- KDA ------------------------------------------------------------------------------------------


def kda_inputs(rng: np.random.Generator, tokens: int) -> Arrays:
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {
        "query": unit(normal(tokens, HEADS, WIDTH)) * np.float32(WIDTH**-0.5),
        "key": unit(normal(tokens, HEADS, WIDTH)),
        "value": normal(tokens, HEADS, WIDTH),
        "log_decay": (-5 / (1 + np.exp(-normal(tokens, HEADS, WIDTH)))).astype(np.float32),
        "beta": rng.random((tokens, HEADS)).astype(np.float32),
        "state": normal(1, HEADS, WIDTH, WIDTH),
        "query_start": i32(0, tokens),
        "context_len": i32(7),
        "state_slot": i32(0),
    }


def kda_recurrence(rng: np.random.Generator) -> Iterator[Case]:
    for tokens in (1, 1024):
        arrays = kda_inputs(rng, tokens)
        ours = Kernel("KdaRecurrence", arrays, {"output": None, "state_out": "state"})
        names = ("query", "key", "value", "log_decay", "beta", "state")
        q, k, v, g, b, state = (as_torch(arrays[name]) for name in names)

        def step(q=q, k=k, v=v, g=g, b=b, state=state):  # type: ignore[no-untyped-def]
            memory = g[0].exp()[..., None] * state[0]
            delta = b[0][:, None] * (v[0] - torch.einsum("hkv,hk->hv", memory, k[0]))
            memory += k[0][..., None] * delta[:, None]
            return torch.einsum("hkv,hk->hv", memory, q[0]), memory

        def chunks(q=q, k=k, v=v, g=g, b=b, state=state):  # type: ignore[no-untyped-def]
            return chunked_recurrence(q, k, v, g, b, state[0])

        eager = step if tokens == 1 else chunks
        flops = 6.0 * tokens * HEADS * WIDTH * WIDTH
        read = arrays["state"].nbytes * 2 + 16.0 * tokens * CHANNELS
        yield Case(f"kda_recurrence T={tokens}", ours, {"eager": eager}, read, flops, fp32=True)


def layer_arrays(rng: np.random.Generator, slots: int) -> Arrays:
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {
        "conv_weight": normal(3 * CHANNELS, 4),
        "a_log": normal(HEADS),
        "dt_bias": normal(CHANNELS),
        "conv_state": normal(slots, 3 * CHANNELS, 3),
        "state": normal(slots, HEADS, WIDTH, WIDTH),
    }


def kda_prefill(rng: np.random.Generator) -> Iterator[Case]:
    tokens = 1024
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    shared = layer_arrays(rng, 1)
    arrays = {
        "qkv": normal(tokens, 3 * CHANNELS),
        "gate": normal(tokens, CHANNELS),
        "beta": normal(tokens, HEADS),
        **shared,
        "query_start": i32(0, tokens),
        "context_len": i32(7),
        "state_slot": i32(0),
    }
    ours = Kernel(
        "KdaPrefill",
        arrays,
        {"output": None, "conv_out": "conv_state", "state_out": "state"},
        lower_bound=-5.0,
    )
    names = ("qkv", "gate", "beta", "conv_weight", "a_log", "dt_bias", "conv_state", "state")
    t = {name: as_torch(arrays[name]) for name in names}

    def eager() -> object:
        window = torch.cat([t["conv_state"][0], t["qkv"].T], 1)
        mixed = torch.nn.functional.conv1d(
            window[None], t["conv_weight"][:, None], groups=3 * CHANNELS
        )[0].T
        mixed = torch.nn.functional.silu(mixed).view(tokens, 3, HEADS, WIDTH)
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
                for x in (mixed[:, 0], mixed[:, 1]))  # fmt: skip
        z = (t["gate"] + t["dt_bias"]).view(tokens, HEADS, WIDTH)
        g = -5.0 * torch.sigmoid(t["a_log"].exp()[:, None] * z)
        return chunked_recurrence(
            q * WIDTH**-0.5, k, mixed[:, 2], g, t["beta"].sigmoid(), t["state"][0]
        )

    flops = 6.0 * tokens * HEADS * WIDTH * WIDTH
    read = 4.0 * tokens * 5 * CHANNELS
    yield Case(f"kda_prefill T={tokens}", ours, {"eager": eager}, read, flops, fp32=True)


def kda_decode(rng: np.random.Generator) -> Iterator[Case]:
    rows = 4 * CHANNELS + RANK + HEADS
    scaled = lambda *shape: bf16(  # noqa: E731
        (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
    )
    for batch in (1, 8):
        shared = layer_arrays(rng, batch)
        caches = {name: shared.pop(name) for name in ("conv_state", "state")}
        arrays = {
            "x": rng.standard_normal((batch, HIDDEN)).astype(np.float32),
            "in_weight": scaled(rows, HIDDEN),
            "f_b_weight": scaled(CHANNELS, RANK),
            "g_b_weight": None,
            **shared,
            "norm_weight": np.ones(WIDTH, np.float32),
            "o_weight": scaled(HIDDEN, CHANNELS),
            **caches,
            "context_len": i32(*[9] * batch),
            "state_slot": i32(*range(batch)),
        }
        present = {name: a for name, a in arrays.items() if a is not None}
        outputs = {"output": None, "conv_out": "conv_state", "state_out": "state"}
        ours = Kernel("KdaDecode", arrays, outputs, lower_bound=-5.0, norm_eps=EPS)
        t = {name: as_torch(a) for name, a in present.items()}
        weights = sum(present[n].nbytes for n in ("in_weight", "f_b_weight", "o_weight"))
        read = weights + 2.0 * present["state"].nbytes
        flops = 2.0 * batch * (weights / 2)
        yield Case(
            f"kda_decode B={batch} bf16",
            ours,
            {"eager": lambda t=t: decode_eager(t)},
            read,
            flops,
            fp32=True,
        )


def decode_eager(t: dict[str, torch.Tensor]) -> torch.Tensor:
    batch = len(t["x"])
    parts = (t["x"].bfloat16() @ t["in_weight"].T).split([3 * CHANNELS, RANK, HEADS, CHANNELS], 1)
    qkv, low, beta, gate = parts
    window = torch.cat([t["conv_state"], qkv[..., None].float()], 2)
    t["conv_state"].copy_(window[:, :, 1:])
    mixed = torch.nn.functional.silu((window * t["conv_weight"]).sum(2))
    mixed = mixed.view(batch, 3, HEADS, WIDTH)
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
            for x in (mixed[:, 0] * WIDTH**-0.5, mixed[:, 1]))  # fmt: skip
    z = ((low @ t["f_b_weight"].T).float() + t["dt_bias"]).view(batch, HEADS, WIDTH)
    decay = torch.exp(-5.0 * torch.sigmoid(t["a_log"].exp()[:, None] * z))
    state = t["state"].mul_(decay[..., None])
    delta = mixed[:, 2] - (state * k[..., None]).sum(2)
    state.addcmul_(k[..., None], (beta.float().sigmoid()[..., None] * delta)[:, :, None])
    o = (state * q[..., None]).sum(2)
    o = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + EPS) * t["norm_weight"]
    gated = o.view(batch, CHANNELS) * torch.sigmoid(gate.float())
    return gated.bfloat16() @ t["o_weight"].T


# ---- Experts --------------------------------------------------------------------------------------


def expert_inputs(rng: np.random.Generator, tokens: int) -> Arrays:
    return {
        "x": rng.standard_normal((tokens, LATENT)).astype(np.float32),
        "expert_ids": np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(
            np.int32
        ),
        "expert_weights": rng.random((tokens, TOP_K)).astype(np.float32),
    }


def experts_eager(t: dict[str, torch.Tensor]) -> torch.Tensor:
    output = torch.zeros_like(t["x"])
    x = t["x"].bfloat16()
    for expert in t["expert_ids"].unique().tolist():
        tokens, places = (t["expert_ids"] == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens] @ t["gate_up"][expert].T).float().chunk(2, -1)
        hidden = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))
        result = (hidden.bfloat16() @ t["down"][expert].T).float()
        output.index_add_(0, tokens, result * t["expert_weights"][tokens, places][:, None])
    return output


def moe_experts(rng: np.random.Generator) -> Iterator[Case]:
    # Eager rounds its activations to bfloat16 as well.
    situ = {"activation": "situ", "beta": 4.0, "linear_beta": 25.0, "bf16_activations": 1}
    shapes = {
        "gate_up": (EXPERTS, 2 * INTERMEDIATE, LATENT),
        "down": (EXPERTS, LATENT, INTERMEDIATE),
    }
    plain = {n: bf16((rng.standard_normal(s) / 32).astype(np.float32)) for n, s in shapes.items()}
    packed: Arrays = {}
    for name, shape in shapes.items():
        packed[f"{name}_packed"] = rng.integers(0, 256, (*shape[:2], shape[2] // 2), np.uint8)
        packed[f"{name}_scale"] = rng.integers(118, 123, (*shape[:2], shape[2] // 32), np.uint8)
    for tokens in (1, 8, 64, 512):
        arrays = expert_inputs(rng, tokens)
        used = len(np.unique(arrays["expert_ids"])) / EXPERTS
        flops = 2.0 * tokens * TOP_K * 3 * LATENT * INTERMEDIATE
        t = {name: as_torch(a) for name, a in (arrays | plain).items()}
        for op, weights, kind in (
            ("MoeExperts", plain, "bf16"),
            ("MoeExpertsMxfp4", packed, "mxfp4"),
        ):
            ours = Kernel(op, arrays | weights, {"output": None}, **situ)
            read = used * sum(a.nbytes for a in weights.values())
            yield Case(
                f"moe_experts T={tokens} {kind}",
                ours,
                {"eager": lambda t=t: experts_eager(t)},
                read,
                flops,
                compiled=False,
            )


def moe_route(rng: np.random.Generator) -> Iterator[Case]:
    for tokens in (1, 512):
        arrays = {
            "x": rng.standard_normal((tokens, HIDDEN)).astype(np.float32),
            "gate_weight": rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32),
            "bias": np.zeros(EXPERTS, np.float32),
        }
        ours = Kernel(
            "MoeRoute",
            arrays,
            {"ids": None, "weights": None},
            ids_output="ids",
            top_k=TOP_K,
            renormalize=1,
            scale=1.0,
        )
        x, gate, bias = (as_torch(a) for a in arrays.values())

        def eager(x=x, gate=gate, bias=bias):  # type: ignore[no-untyped-def]
            scores = torch.sigmoid(x @ gate.T)
            ids = torch.topk(scores + bias, TOP_K).indices
            weights = scores.gather(1, ids)
            return ids, weights / (weights.sum(1, keepdim=True) + 1e-20)

        flops = 2.0 * tokens * EXPERTS * HIDDEN
        yield Case(
            f"moe_route T={tokens}", ours, {"eager": eager}, arrays["x"].nbytes, flops, fp32=True
        )


# ---- Attention residuals --------------------------------------------------------------------------


def attn_res(rng: np.random.Generator) -> Iterator[Case]:
    sources, sites = 2, 8
    for tokens in (1, 1024):
        values = rng.standard_normal((sources, tokens, HIDDEN)).astype(np.float32)
        queries = (rng.standard_normal((sites, HIDDEN)) / 45).astype(np.float32)
        ours = Kernel(
            "AttnResPrepare",
            {"sources": values, "queries": queries},
            {"numerator": None, "logit_max": None, "exp_sum": None},
            eps=EPS,
        )
        v, q = as_torch(values), as_torch(queries)

        def prepare(v=v, q=q):  # type: ignore[no-untyped-def]
            scores = torch.einsum("ntd,sd->snt", v, q) * torch.rsqrt(v.square().mean(-1) + EPS)
            top = scores.amax(1)
            weights = (scores - top[:, None]).exp()
            return torch.einsum("snt,ntd->std", weights, v), top, weights.sum(1)

        size = 4.0 * tokens * HIDDEN
        yield Case(
            f"attn_res_prepare T={tokens}",
            ours,
            {"eager": prepare},
            size * (sources + sites),
            0,
            fp32=True,
        )

        numerator, top, total = prepare()
        arrays = {
            "prefix": values[0],
            "query": queries[0],
            "numerator": numerator.numpy(),
            "logit_max": top.numpy(),
            "exp_sum": total.numpy(),
        }
        ours = Kernel("AttnResUpdate", arrays, {"output": None}, site=0, eps=EPS)
        p, u = (as_torch(arrays[name]) for name in ("prefix", "query"))
        n, m, s = numerator[0], top[0], total[0]

        def update(p=p, u=u, n=n, m=m, s=s):  # type: ignore[no-untyped-def]
            score = (p @ u) * torch.rsqrt(p.square().mean(-1) + EPS)
            merged = torch.maximum(score, m)
            frozen, live = (m - merged).exp(), (score - merged).exp()
            sums = s * frozen + live
            return n * (frozen / sums)[:, None] + p * (live / sums)[:, None]

        yield Case(f"attn_res_update T={tokens}", ours, {"eager": update}, size * 3, 0, fp32=True)


GROUPS = (kda_recurrence, kda_prefill, kda_decode, moe_route, moe_experts, attn_res)
