from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus.live.engine.kernels import Kernels, Scope, native, select
from isthmus.live.engine.kernels.plain import PlainKernels
from isthmus.live.engine.linear import advance_rule, step_each, step_together

from .support import NAN, attention, largest_error, permutation, randn, relative_error

F32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {F32: 2e-5, BF16: 2**-7}
HEAD_DIMS = pytest.mark.parametrize("head_dim", [16, 20, 32, 64, 80, 128, 192])
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Form:
    """One form of the kernels, with the type of its activations and that of stored weights and KV."""

    kernels: Kernels
    dtype: torch.dtype
    stored: torch.dtype


@pytest.fixture(
    params=["native-f32-f32", "native-f32-bf16", "plain-f32-f32", "plain-f32-bf16", "plain-bf16-bf16"]
)
def form(request: pytest.FixtureRequest, native_kernels: Kernels) -> Form:
    """Every pair of types each form takes; that plain's are among them makes native equal to plain."""
    name, *types = request.param.split("-")
    dtype, stored = ({"f32": F32, "bf16": BF16}[word] for word in types)
    return Form(native_kernels if name == "native" else PlainKernels(), dtype, stored)


# ---- attend_paged


@dataclass
class Paged:
    """Rows over a paged memory in which every slot that no row may look at holds NaN."""

    q_RHD: Tensor
    kv_S2KD: Tensor
    tables_RB: Tensor
    lens_R: Tensor
    window: int
    slots: list[list[int]]
    """The slots that row r attends to."""

    @property
    def scale(self) -> float:
        return self.q_RHD.shape[2] ** -0.5

    def attend(self, kernels: Kernels) -> tuple[Tensor, Tensor]:
        return kernels.attend_paged(
            self.q_RHD, self.kv_S2KD, self.tables_RB, self.lens_R, Scope(BLOCK_SIZE, self.window, self.scale)
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        parts = []
        for row, slots in enumerate(self.slots):
            seen = torch.ones(1, len(slots), dtype=torch.bool)
            parts.append(attention(self.q_RHD[row : row + 1], self.kv_S2KD[slots], seen, self.scale))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def check(self, kernels: Kernels) -> None:
        (out, lse), (expected_out, expected_lse) = self.attend(kernels), self.expected()
        assert out.dtype == self.q_RHD.dtype and lse.dtype == F32
        assert largest_error(out, expected_out) <= TOLERANCE[out.dtype]
        assert largest_error(lse, expected_lse) <= TOLERANCE[F32]


def paged(
    lens: list[int], *, group: int, head_dim: int, dtype: torch.dtype, stored: torch.dtype, window: int = 0
) -> Paged:
    """Each row has blocks of its own, in shuffled order; unused table entries name a block full of NaN."""
    counts = [-(-length // BLOCK_SIZE) for length in lens]
    order = permutation(sum(counts) + 1, seed=len(lens))
    poisoned = order.pop()
    kv = torch.full(((sum(counts) + 1) * BLOCK_SIZE, 2, 2, head_dim), NAN, dtype=stored)
    values = randn(*kv.shape, seed=3, dtype=stored)
    tables = torch.full((len(lens), max(counts)), poisoned, dtype=torch.int32)
    slots = []
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        blocks, order = order[:count], order[count:]
        tables[row, :count] = torch.tensor(blocks)
        first = max(0, length - window) if window else 0
        seen = [blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(first, length)]
        kv[seen] = values[seen]
        slots.append(seen)
    q = randn(len(lens), 2 * group, head_dim, seed=4, dtype=dtype)
    return Paged(q, kv, tables, torch.tensor(lens, dtype=torch.int32), window, slots)


LENS = [1, 37, 4, 5, 100, 3, 64, 17]


@HEAD_DIMS
@pytest.mark.parametrize("window", [0, 1, 4, 6, 100])
def test_rows_attend_to_their_own_keys_and_nothing_else(form: Form, head_dim: int, window: int) -> None:
    for group in range(1, 9):
        paged(LENS, group=group, head_dim=head_dim, dtype=form.dtype, stored=form.stored, window=window).check(
            form.kernels
        )


@pytest.mark.parametrize(("head_dim", "group"), [(40, 1), (40, 18), (64, 35), (192, 3), (576, 17)])
def test_one_vector_may_be_key_and_value(form: Form, head_dim: int, group: int) -> None:
    """As in latent attention, where many query heads share one."""
    case = paged(LENS, group=group, head_dim=head_dim, dtype=form.dtype, stored=form.stored)
    case.kv_S2KD[:, 1] = case.kv_S2KD[:, 0]
    case.kv_S2KD, (out, lse) = case.kv_S2KD[:, :1].contiguous(), case.expected()
    found, found_lse = case.attend(form.kernels)
    assert (
        largest_error(found, out) <= TOLERANCE[form.dtype] and largest_error(found_lse, lse) <= TOLERANCE[F32]
    )


@pytest.mark.parametrize("head_dim", [20, 64, 128])
@pytest.mark.parametrize(("lens", "group"), [(LENS, 23), ([2, 3001, 1], 3)], ids=["many heads", "a long row"])
def test_more_than_one_task_computes(form: Form, lens: list[int], group: int, head_dim: int) -> None:
    paged(lens, group=group, head_dim=head_dim, dtype=form.dtype, stored=form.stored).check(form.kernels)


def test_attention_survives_scores_too_large_for_exp(kernels: Kernels) -> None:
    """Scores of +-1,000 and further apart than exp can say: the largest decides."""
    case = paged([9], group=1, head_dim=16, dtype=F32, stored=F32)
    case.q_RHD = torch.ones(1, 2, 16)
    case.kv_S2KD[case.slots[0], 0] = torch.linspace(-250, 250, 9)[:, None, None]
    out, lse = case.attend(kernels)
    assert torch.allclose(out[0], case.kv_S2KD[case.slots[0][-1], 1], rtol=1e-6)
    assert torch.allclose(lse, torch.full((1, 2), 1000.0), rtol=1e-6)


# ---- attend_chunk


@pytest.mark.parametrize("head_dim", [16, 20, 48, 64, 80, 128, 192])
@pytest.mark.parametrize(
    ("start", "count", "window"),
    [
        (0, 9, 0),
        (0, 97, 0),
        (5, 64, 0),
        (130, 70, 0),
        (64, 128, 0),
        (300, 11, 0),
        (0, 97, 6),
        (130, 70, 65),
        (9, 9, 99),
    ],
)
def test_a_chunk_attends_to_what_is_before_it_and_to_itself(
    form: Form, head_dim: int, start: int, count: int, window: int
) -> None:
    """What nobody may look at holds NaN, in blocks of any order."""
    length, scale = start + count, head_dim**-0.5
    blocks = permutation(-(-length // BLOCK_SIZE) + 2, seed=count)
    slots = [blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(length)]
    seen = slots[max(0, start + 1 - window) if window else 0 :]
    kv = torch.full((len(blocks) * BLOCK_SIZE, 2, 2, head_dim), NAN, dtype=form.stored)
    kv[seen] = randn(len(seen), 2, 2, head_dim, seed=3, dtype=form.stored)
    positions, keys = torch.arange(start, length)[:, None], torch.arange(length - len(seen), length)
    visible = keys <= positions
    if window:
        visible &= keys > positions - window
    for group in (1, 2, 3, 5, 12):
        q = randn(count, 2 * group, head_dim, seed=group, dtype=form.dtype)
        out = form.kernels.attend_chunk(
            q, kv, blocks, np.arange(start, start + len(q), dtype=np.int32), Scope(BLOCK_SIZE, window, scale)
        )
        expected, _ = attention(q, kv[seen], visible, scale)
        tolerance = TOLERANCE[BF16 if form.stored == BF16 else form.dtype]
        assert out.dtype == form.dtype
        assert largest_error(out, expected) <= tolerance, group
        assert relative_error(out, expected) <= tolerance / 2, group


def test_large_scores_of_a_chunk_do_not_overflow(native_kernels: Kernels) -> None:
    """Of one query all weight is on its own key, of the other it is shared by two."""
    q = torch.zeros(9, 1, 16)
    q[:, 0, 0] = 1e4
    kv = torch.zeros(16, 2, 1, 16, dtype=BF16)
    kv[:9, 0, 0, 0] = torch.arange(9) // 2 * 2
    kv[:9, 1, 0] = torch.arange(9)[:, None]
    out = native_kernels.attend_chunk(q, kv, [0], np.arange(len(q), dtype=np.int32), Scope(16, 0, 0.25))
    assert out[:, 0, 0].tolist() == [0, 0.5, 2, 2.5, 4, 4.5, 6, 6.5, 8]


# ---- rope_store


def rotated(x_THD: Tensor, turn_T1D: Tensor, norm_D: Tensor | None, eps: float) -> Tensor:
    """By complex multiplication, in float64, after the norm if any."""
    if norm_D is not None:
        x_THD = x_THD / (x_THD.square().mean(-1, keepdim=True) + eps).sqrt() * norm_D
    half = x_THD.shape[-1] // 2
    pairs = torch.complex(x_THD[..., :half], x_THD[..., half:]) * turn_T1D
    return torch.cat((pairs.real, pairs.imag), dim=-1)


@HEAD_DIMS
@pytest.mark.parametrize("norms", [False, True], ids=["no-norms", "qk-norms"])
def test_q_and_k_are_rotated_and_k_and_v_stored_and_nothing_else_changes(
    form: Form, head_dim: int, norms: bool
) -> None:
    groups = [(group, 11) for group in range(1, 9)]
    for group, num_tokens in (*groups, (4, 300)):  # so many are shared among threads
        heads, num_slots, eps = 2 * group, num_tokens + 6, 1e-3
        qkv = randn(num_tokens, (heads + 4) * head_dim, seed=1, dtype=form.dtype)
        positions = torch.tensor(permutation(num_tokens + 30, seed=2)[:num_tokens], dtype=torch.int32)
        slots = torch.tensor(permutation(num_slots, seed=3)[:num_tokens], dtype=torch.int32)
        cos_sin, kv = randn(num_tokens + 30, head_dim, seed=4), torch.full((num_slots, 2, 2, head_dim), 7.0)
        kv = kv.to(form.stored)
        q_norm, k_norm = (randn(head_dim, seed=seed) if norms else None for seed in (5, 6))
        before = qkv.clone()
        q = form.kernels.rope_store(qkv, positions, slots, cos_sin, q_norm, k_norm, eps, kv, heads)
        angles = cos_sin.double()[positions.long()]
        turn = torch.complex(*angles.chunk(2, dim=-1))[:, None]
        own_q, own_k, own_v = qkv.double().view(num_tokens, -1, head_dim).split((heads, 2, 2), dim=1)
        assert q.shape == (num_tokens, heads, head_dim) and q.dtype == form.dtype
        # In bfloat16 the norm, its weight and the rotation round one after the other.
        assert largest_error(q, rotated(own_q, turn, q_norm, eps)) <= 2 * TOLERANCE[form.dtype], group
        stored = kv[slots.long()]
        assert largest_error(stored[:, 0], rotated(own_k, turn, k_norm, eps)) <= 2 * TOLERANCE[form.stored], (
            group
        )
        assert torch.equal(stored[:, 1], own_v.to(form.stored)) and torch.equal(qkv, before)
        unused = sorted(set(range(num_slots)) - set(slots.tolist()))
        assert unused and (kv[unused] == 7).all()


# ---- linear


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("width", [16, 20, 64, 97])
def test_linear_is_the_product_with_the_weights_as_stored(form: Form, width: int, bias: bool) -> None:
    """Row counts around every tile size, and past the count from which torch's own product is taken."""
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 23, 40, 41, 70):
        for outs in (1, 3, 4, 6, 33):
            x = randn(rows, width, seed=1, dtype=form.dtype)
            weight = randn(outs, width, seed=2, dtype=form.stored)
            bias_N = randn(outs, seed=3, dtype=form.dtype) if bias else None
            out = form.kernels.linear(x, weight, bias_N)
            expected = x.double() @ weight.double().T + (bias_N.double() if bias_N is not None else 0.0)
            assert out.shape == (rows, outs) and out.dtype == form.dtype
            assert largest_error(out, expected) <= TOLERANCE[form.stored], (rows, outs)


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_few_rows_meet_bfloat16_weights_without_rounding_the_activations(
    native_kernels: Kernels, rows: int
) -> None:
    x, weight = randn(rows, 300, seed=1), randn(50, 300, seed=2, dtype=BF16)
    out = native_kernels.linear(x, weight, None)
    assert largest_error(out, x.double() @ weight.double().T) <= 1e-5


# ---- add_rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 100), (3, 64), (0, 64), (300, 257)])
@pytest.mark.parametrize("adds", [True, False])
def test_delta_if_any_is_added_in_place_then_the_sum_is_normed(
    form: Form, rows: int, width: int, adds: bool
) -> None:
    x, weight = randn(rows, width, seed=1, dtype=form.dtype), randn(width, seed=3)
    delta = randn(rows, width, seed=2, dtype=form.dtype) if adds else None
    added, kept = x if delta is None else x + delta, None if delta is None else delta.clone()
    added = added.clone()
    out = form.kernels.add_rms_norm(x, delta, weight, 1e-3)
    assert torch.equal(x, added) and (kept is None or torch.equal(delta, kept))
    assert out.shape == x.shape and out.dtype == form.dtype
    assert largest_error(out, rms_norm(added, weight, 1e-3)) <= TOLERANCE[form.dtype]


# ---- add_part


@pytest.mark.parametrize("rows", [slice(1, 4), torch.tensor([4, 0, 2])], ids=["slice", "named"])
@pytest.mark.parametrize(("head", "count", "head_dim"), [(0, 6, 64), (2, 2, 20), (5, 1, 128)])
def test_a_part_is_added(form: Form, rows: slice | Tensor, head: int, count: int, head_dim: int) -> None:
    """Weighed exactly, though exponentials of the weights overflow; of other rows and heads nothing changes."""
    out, lse = randn(5, 6, head_dim), 90 * randn(5, 6, seed=1)
    part, weight = randn(3, count, head_dim, seed=2), 90 * randn(3, count, seed=3)
    heads = slice(head, head + count)
    lse[rows, heads][0] = weight[0] = lse[rows, heads][0].clone() + 0.5
    expected, total = out.double(), lse.double()
    both = torch.stack((total[rows, heads], weight.double()))
    shares = both.softmax(0)[..., None]
    expected[rows, heads] = shares[0] * expected[rows, heads] + shares[1] * part
    total[rows, heads] = both.logsumexp(0)
    form.kernels.add_part(out, lse, rows, heads, (part, weight))
    assert largest_error(out, expected) < 1e-5 and relative_error(lse, total) < 1e-6


def test_parts_of_nothing_add_nothing(form: Form) -> None:
    """Neither here nor there: 0 of no weight, never NaN."""
    nothing = float("-inf")
    out, lse = torch.tensor([[[1.0]], [[0.0]], [[0.0]]]), torch.tensor([[2.0], [nothing], [nothing]])
    part = torch.tensor([[[0.0]], [[3.0]], [[0.0]]]), torch.tensor([[nothing], [4.0], [nothing]])
    form.kernels.add_part(out, lse, slice(0, 3), slice(0, 1), part)
    assert out.flatten().tolist() == [1.0, 3.0, 0.0] and lse.flatten().tolist() == [2.0, 4.0, nothing]


# ---- silu_mul


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 100), (0, 64), (300, 257)])
def test_gate_is_passed_through_silu_and_multiplied(form: Form, rows: int, width: int) -> None:
    gate_up = randn(rows, 2 * width, dtype=form.dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    out = form.kernels.silu_mul(gate_up)
    assert out.shape == (rows, width) and out.dtype == form.dtype
    assert largest_error(out, gate * up / (1 + (-gate).exp())) <= TOLERANCE[form.dtype]
    for extreme in (
        -1e4,
        -100.0,
        -90.0,
        -88.0,
        -50.0,
        0.0,
        50.0,
        1e4,
    ):  # exp(-gate) overflows float32 below -88
        gate_up[:, :width], gate_up[:, width:] = extreme, 2.0
        expected = torch.full_like(out, 2 * max(extreme, 0.0))
        assert torch.allclose(form.kernels.silu_mul(gate_up), expected, rtol=1e-6, atol=1e-18)


# ---- expert_mlps


@pytest.mark.parametrize("counts", [[1, 0, 7, 2], [0, 0, 3, 0], [60, 1, 0, 5], [0, 0, 0, 0]])
@pytest.mark.parametrize(("width", "inner"), [(16, 32), (50, 19)])
def test_each_row_goes_through_its_expert(form: Form, counts: list[int], width: int, inner: int) -> None:
    """Few rows of each expert, and more than the native kernel takes at once."""
    x = randn(sum(counts), width, seed=1, dtype=form.dtype)
    gate_up = randn(4, 2 * inner, width, seed=2, dtype=form.stored)
    down = randn(4, width, inner, seed=3, dtype=form.stored) / 16
    out = form.kernels.expert_mlps(x, counts, gate_up, down)
    expected, at = [], 0
    for expert, count in enumerate(counts):
        gate, up = (x[at : at + count].double() @ gate_up[expert].double().T).chunk(2, dim=-1)
        expected.append(gate * up / (1 + (-gate).exp()) @ down[expert].double().T)
        at += count
    assert out.shape == x.shape and out.dtype == form.dtype
    assert relative_error(out, torch.cat(expected)) <= TOLERANCE[form.stored] or not sum(counts)


# ---- delta_step and delta_run


@dataclass
class DeltaCase:
    """One sequence of a recurrent layer by its formulas, in float64, one head and one token at a time."""

    keys: int
    heads: int
    key_dim: int
    value_dim: int
    weight_WC: Tensor
    inputs: Tensor
    state: Tensor

    def token(self, qkv_C: Tensor, decay_H1: Tensor, beta_H: Tensor) -> Tensor:
        """`[H, V]`; inputs and state move on."""
        size, values = self.key_dim, self.heads * self.value_dim
        seen = torch.cat((self.inputs, qkv_C.double()[None]))
        self.inputs = seen[1:]
        mixed = (seen * self.weight_WC.double()).sum(0)
        mixed = mixed / (1 + (-mixed).exp())
        q, k, v = mixed.split((self.keys * size, self.keys * size, values))
        outs = []
        for head in range(self.heads):
            at = head // (self.heads // self.keys) * size
            query, key = (x[at : at + size] / (x[at : at + size].square().sum() + 1e-6).sqrt() for x in (q, k))
            value = v[head * self.value_dim : (head + 1) * self.value_dim]
            matrix = self.state[head] * decay_H1[head].double().exp()[:, None]
            matrix += torch.outer(key, float(beta_H[head]) * (value - key @ matrix))
            self.state[head] = matrix
            outs.append(query / size**0.5 @ matrix)
        return torch.stack(outs)


DELTA_SIZES = pytest.mark.parametrize(
    ("keys", "heads", "key_dim", "value_dim", "taps", "decays"),
    [
        (2, 6, 16, 24, 4, "head"),
        (3, 3, 20, 9, 2, "head"),
        (1, 2, 33, 83, 4, "head"),
        (2, 2, 33, 83, 4, "channel"),
        (3, 3, 16, 24, 3, "channel"),
    ],
)


def delta_inputs(
    num: int, heads: int, decays: int, channels: int, seed: int, strength: float = 1.0, alike: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv, a part of a wider projection; decays, some hardly any and some to nothing; beta. `alike`: equal keys, each
    of which replaces what the one before wrote, the triangular system at its worst."""
    qkv = randn(num, channels + 5, seed=seed)[:, :channels]
    decay = -strength * (3 * randn(num, heads, decays, seed=seed + 1)).exp()
    if alike:
        return qkv[:1].expand(num, -1).contiguous(), torch.zeros_like(decay), torch.ones(num, heads)
    return qkv, decay, randn(num, heads, seed=seed + 2).sigmoid()


@DELTA_SIZES
def test_one_token_of_each_request_goes_through_convolution_and_rule(
    kernels: Kernels, keys: int, heads: int, key_dim: int, value_dim: int, taps: int, decays: str
) -> None:
    """Several tokens in turn; slots that nobody has stay as they are, and so do those of other layers."""
    slots, channels = [5, 0, 3], 2 * keys * key_dim + heads * value_dim
    sizes = (taps - 1) * channels, heads * key_dim * value_dim
    live, weight = randn(7, 2, sum(sizes), seed=1), randn(taps, channels, seed=2)
    before = live.clone()
    window, state = live[:, 1].split(sizes, dim=1)
    window, state = window.unflatten(1, (taps - 1, channels)), state.unflatten(1, (heads, key_dim, value_dim))
    cases = [
        DeltaCase(keys, heads, key_dim, value_dim, weight, window[slot].double(), state[slot].double())
        for slot in slots
    ]
    for token in range(3):
        qkv, decay, beta = delta_inputs(3, heads, 1 if decays == "head" else key_dim, channels, 10 * token)
        out = kernels.delta_step(qkv, decay, beta, window, state, torch.tensor(slots), weight)
        assert out.shape == (3, heads, value_dim) and out.dtype == F32
        for row, case in enumerate(cases):
            assert largest_error(out[row], case.token(qkv[row], decay[row], beta[row])) <= 2e-5
    for slot, case in zip(slots, cases, strict=True):
        assert largest_error(state[slot], case.state) <= 2e-5
        assert torch.equal(window[slot], case.inputs.float())
    assert torch.equal(live[:, 0], before[:, 0])
    assert torch.equal(live[[1, 2, 4, 6]], before[[1, 2, 4, 6]])


@DELTA_SIZES
@pytest.mark.parametrize(("strength", "alike"), [(1e-3, False), (1.0, False), (1e4, False), (1.0, True)])
def test_a_run_of_tokens_is_one_token_after_the_other(
    kernels: Kernels,
    keys: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    taps: int,
    decays: str,
    strength: float,
    alike: bool,
) -> None:
    """Shorter than the window, longer, and past the chunks that the plain form cuts it into."""
    channels = 2 * keys * key_dim + heads * value_dim
    weight, window = randn(taps, channels, seed=2), randn(taps - 1, channels, seed=3)
    state = randn(heads, key_dim, value_dim, seed=4)
    case = DeltaCase(keys, heads, key_dim, value_dim, weight, window.double(), state.double())
    for num in (1, 2, 70):
        num_decays = 1 if decays == "head" else key_dim
        qkv, decay, beta = delta_inputs(num, heads, num_decays, channels, 10 * num, strength, alike)
        out = kernels.delta_run(qkv, decay, beta, window, state, weight)
        assert out.shape == (num, heads, value_dim) and out.dtype == F32
        expected = torch.stack([case.token(*each) for each in zip(qkv, decay, beta, strict=True)])
        assert largest_error(out, expected) <= 2e-5
        assert largest_error(state, case.state) <= 2e-5
        assert torch.equal(window, case.inputs.float())


@pytest.mark.parametrize("decays", [1, 16])
def test_a_strong_decay_does_not_blur_the_weak_ones_after_it(decays: int) -> None:
    """Sums of decays from the chunk's start would lose the digits of the later ones."""
    q, k = (torch.nn.functional.normalize(randn(64, 4, 16, seed=seed), dim=-1) for seed in (1, 2))
    v, beta, decay = (
        randn(64, 4, 12, seed=3),
        randn(64, 4, seed=4).sigmoid(),
        -0.05 * randn(64, 4, decays).abs(),
    )
    decay[3], states, alone = -1e6, torch.zeros(1, 4, 16, 12), torch.zeros(1, 4, 16, 12)
    tokens = zip(q.split(1), k.split(1), v.split(1), decay.split(1), beta.split(1), strict=True)
    expected = torch.cat([step_together(*token, states, torch.tensor([0])) for token in tokens])
    assert largest_error(advance_rule(q, k, v, decay, beta, alone[0]), expected) < 1e-6


def test_single_tokens_may_step_all_at_once() -> None:
    """As on a GPU."""
    q, k, v = randn(3, 2, 16, seed=1), randn(3, 2, 16, seed=2), randn(3, 4, 12, seed=3)
    decay, beta, states = (
        -randn(3, 4, 1, seed=4).abs(),
        randn(3, 4, seed=5).sigmoid(),
        randn(5, 4, 16, 12, seed=6),
    )
    other, slots = states.clone(), torch.tensor([4, 0, 2])
    found, expected = (
        step(q, k, v, decay, beta, held, slots) for step, held in ((step_together, states), (step_each, other))
    )
    assert largest_error(found, expected) < 1e-6 and largest_error(states, other) < 1e-6


# ---- choice and building


def test_the_native_kernels_are_chosen_on_a_cpu(native_kernels: Kernels) -> None:
    assert select(torch.device("cpu")).name == native_kernels.name == "native"


def test_loading_the_native_kernels_leaves_small_numbers_alone(native_kernels: Kernels) -> None:
    """Code built with -ffast-math may tell the whole process to take subnormal numbers for zero."""
    assert float(torch.tensor([1e-40]) * 1.0) > 0


def test_without_a_compiler_torch_kernels_are_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.load() is None
    assert len(caplog.records) == 1 and "compiler" in caplog.text
    assert select(torch.device("cpu")).name == PlainKernels.name
