"""KDA in fp64 numpy, written from spec MODELS.md 3.1: the truth that the kernels are held to."""

from __future__ import annotations

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))


def recurrence(query, key, value, log_decay, beta, state, query_start, context_len, state_slot):
    """Outputs [T, H, V] and the new states, from fp64 loops over tokens."""
    output = np.zeros(value.shape)
    states = np.array(state, np.float64)
    for row, slot in enumerate(state_slot):
        start, stop = query_start[row], query_start[row + 1]
        if slot < 0 or start == stop:
            continue
        memory = states[slot] if context_len[row] else np.zeros_like(states[slot])
        for t in range(start, stop):
            memory = np.exp(log_decay[t])[:, :, None] * memory
            predicted = np.einsum("hkv,hk->hv", memory, key[t])
            change = beta[t][:, None] * (value[t] - predicted)
            memory = memory + key[t][:, :, None] * change[:, None, :]
            output[t] = np.einsum("hkv,hk->hv", memory, query[t])
        states[slot] = memory
    return output, states


def log_decay(gate, a_log, dt_bias, lower_bound):
    z = (gate + dt_bias).reshape(len(gate), len(a_log), -1)
    rate = np.exp(a_log)[:, None]
    if lower_bound is None:
        return -rate * np.logaddexp(0.0, z)
    return lower_bound * sigmoid(rate * z)


def l2_normalise(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def prefill(
    qkv, gate, beta, conv_weight, a_log, dt_bias, conv_state, state,
    query_start, context_len, state_slot, lower_bound,
):  # fmt: skip
    """Outputs [T, H, V], the new convolution states and the new states."""
    heads, taps = len(a_log), conv_weight.shape[1]
    mixed = np.zeros_like(qkv)
    histories = np.array(conv_state, np.float64)
    for row, slot in enumerate(state_slot):
        start, stop = query_start[row], query_start[row + 1]
        if slot < 0 or start == stop:
            continue
        past = histories[slot] if context_len[row] else np.zeros_like(histories[slot])
        window = np.concatenate([past, qkv[start:stop].T], axis=1)
        for t in range(start, stop):
            summed = (window[:, t - start : t - start + taps] * conv_weight).sum(1)
            mixed[t] = summed * sigmoid(summed)
        histories[slot] = window[:, window.shape[1] - (taps - 1) :]
    query, key, value = (part.reshape(len(qkv), heads, -1) for part in np.split(mixed, 3, axis=1))
    output, states = recurrence(
        l2_normalise(query) * query.shape[-1] ** -0.5,
        l2_normalise(key),
        value,
        log_decay(gate, a_log, dt_bias, lower_bound),
        sigmoid(beta),
        state,
        query_start,
        context_len,
        state_slot,
    )
    return output, histories, states


def decode(
    x, in_weight, f_b_weight, g_b_weight, conv_weight, a_log, dt_bias, norm_weight, o_weight,
    conv_state, state, context_len, state_slot, lower_bound, norm_eps,
):  # fmt: skip
    """Outputs [B, D], the new convolution states and the new states."""
    batch, heads = len(x), len(a_log)
    width, rank = len(conv_weight), f_b_weight.shape[1]
    parts = x @ in_weight.T
    qkv, low, beta, gate = np.split(parts, np.cumsum([width, rank, heads]), axis=1)
    if g_b_weight is not None:
        gate = gate @ g_b_weight.T
    core, histories, states = prefill(
        qkv, low @ f_b_weight.T, beta, conv_weight, a_log, dt_bias, conv_state, state,
        np.arange(batch + 1), context_len, state_slot, lower_bound,
    )  # fmt: skip
    mean = (core * core).mean(-1, keepdims=True)
    normed = core / np.sqrt(mean + norm_eps) * norm_weight
    output = (normed.reshape(batch, -1) * sigmoid(gate)) @ o_weight.T
    return np.where(np.asarray(state_slot)[:, None] >= 0, output, 0.0), histories, states
