"""From logits: one pass forward, chunk by chunk, and one back that writes their gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .layouts import _wide, exp

# === body ===


class _FromRows(torch.autograd.Function):
    """The loss as a function of logits: backward writes their gradient chunk by chunk.

    What it needs goes through save_for_backward, so a loss that is kept for a log does not keep the logits alive.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, logits: Tensor, rows: _Rows, names: tuple[str, ...], *tensors: Tensor
    ) -> Tensor:
        ctx.rows, ctx.names = rows, names
        ctx.save_for_backward(*tensors)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        written = ctx.rows.backward(tensors | {"upstream": upstream[0]})
        return None, written, None, None, *(None for _ in tensors)


class _Rows:
    """Rows of logits with what belongs to each, worked through in chunks; no chunk's float32 copy outlives its turn.

    With `shift` row i scores token i + 1 of the flattened batch; an answer's first token is dead, so that no row scores
    a token of another answer.
    """

    def __init__(
        self,
        loss: Any,
        logits: Tensor,
        tokens: Tensor,
        temperature: float | Tensor,
        shift: bool,
        given: Mapping[str, Tensor],
        max_bytes: int | None,
        inplace: bool = False,
    ) -> None:
        self.loss, self.shape, self.inplace = loss, logits.shape, inplace
        self.dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
        n, vocab = tokens.numel(), logits.shape[-1]
        self.skip = int(shift and n > 0)  # the first token has no row, the last row no token
        found = _row_inputs(loss, tokens, temperature, given, self.dtype)
        self.tensors = {k: x[self.skip :] if x.dim() else x for k, x in found.items()}
        self.tensors["logits"] = logits.detach().reshape(n, vocab)[: n - self.skip]
        # Compiled, a row that reads nothing but its own logits leaves no temporaries: one chunk.
        fused = loss.compiled and not any(x.startswith("log_") for x in _read(loss))
        max_bytes = _piece_bytes(logits.device) if max_bytes is None else max_bytes
        self.step = max(1, n if fused else max_bytes // max(vocab * self.dtype.itemsize, 1))

    def _chunks(self, tensors: Mapping[str, Tensor]) -> list[tuple[slice, dict[str, Tensor]]]:
        """Even pieces (a last piece of one row would be a size of its own to compile for)."""
        n = tensors["logits"].shape[0]
        pieces = -(-n // self.step)
        found = []
        for i in range(pieces):
            at = slice(n * i // pieces, n * (i + 1) // pieces)
            found.append((at, {k: x[at] if x.dim() else x for k, x in tensors.items()}))
        return found

    def forward(self) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """log pi of the sampled tokens, the sums over the vocabulary and the centring term, in the tokens' shape."""
        parts: dict[str, list[Tensor]] = {}
        for _, rows in self._chunks(self.tensors):
            for name, x in _run(self.loss, _rows_forward, rows).items():
                parts.setdefault(name, []).append(x)
        zero = torch.zeros(self.skip, 1, dtype=self.dtype, device=self.tensors["logits"].device)
        if not parts:
            parts = {name: [zero[:0]] for name in ("logp", "lse", "centre", *self.loss.SUMS)}
        self.tensors["lse"] = torch.cat(parts.pop("lse"))
        found = {name: torch.cat([zero, *x]).reshape(self.shape[:-1]) for name, x in parts.items()}
        return found.pop("logp"), {k: found[k] for k in self.loss.SUMS}, found.get("centre", zero.sum())

    def saved(
        self, gradients: Mapping[str, Tensor], centre: Tensor | None
    ) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
        """(names, tensors) that backward needs: the rows, and d loss / d log pi, d loss / d each sum and the centring weight.

        From here on they are autograd's: nothing else holds the logits.
        """
        found = {f"d:{k}": g for k, g in gradients.items()} | ({} if centre is None else {"centre": centre})
        weights = {k: x.expand(self.shape[:-1]).reshape(-1, 1)[self.skip :].to(self.dtype) for k, x in found.items()}
        given, self.tensors = self.tensors | weights, {}
        return tuple(given), tuple(given.values())

    def backward(self, tensors: dict[str, Tensor]) -> Tensor:
        """d loss / d logits, in their dtype; `inplace`, written over them."""
        logits = tensors["logits"]
        shape = (logits.shape[0] + self.skip, logits.shape[1])
        whole = logits.as_strided(shape, logits.stride()) if self.inplace else logits.new_empty(shape)
        whole[shape[0] - self.skip :] = 0  # the last row scores nothing
        for at, rows in self._chunks(tensors):
            _write(self.loss, rows, rows["logits"] if self.inplace else whole[at])
        return whole.reshape(self.shape)


def _check_inplace(logits: Tensor) -> None:
    """Whether their gradient may be written over the logits: they are a step of the graph, whole, and nobody traces it."""
    if logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace=True would overwrite logits that are a leaf of the graph: pass what a model computed")
    if not logits.is_contiguous():
        raise ValueError(
            "inplace=True needs contiguous logits: a view with gaps, or a repeated row, has no room for them"
        )
    if torch.compiler.is_compiling():
        raise ValueError("inplace=True is not for use inside torch.compile: the compiler plans its memory itself")


def _read(loss: Any) -> set[str]:
    """What the functions of the vocabulary read besides pi."""
    read = {a for part in ("distribution", "d_distribution", "centre") for a in loss._arguments[part]}
    return read & {"log_mu", "log_prox", "log_ref", "A", *loss.INPUTS}


def _row_inputs(
    loss: Any, tokens: Tensor, temperature: float | Tensor, given: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """What belongs to each token besides its logits, [n, 1] or [n, columns]; 0-dim where it is the same for all.

    What changes nothing is left out, and no row spends time on it: a temperature of 1; `live`, once rows are chosen by it.
    """
    n, read = tokens.numel(), _read(loss)

    def per_token(x: Tensor, *columns: int) -> Tensor:
        x = x if x.dim() == 0 or x.shape[: tokens.dim()] == tokens.shape else x[:, None].expand(tokens.shape)
        return x.detach().reshape(n, *(columns or (1,)))

    live = per_token(given["mask"])
    found = {"live": live, "tokens": torch.where(live, per_token(tokens), 0).long()}
    if isinstance(temperature, Tensor) or temperature != 1:
        t = torch.as_tensor(temperature, dtype=dtype, device=tokens.device)
        found["inverse_t"] = torch.where(live, 1 / per_token(t), 0.0) if t.dim() else 1 / t.detach()
    for policy in ("mu", "prox", "ref"):
        x, ids = given.get(f"{policy}_logprobs"), given.get("mu_topk_ids") if policy == "mu" else None
        if f"log_{policy}" not in read:
            continue
        if ids is not None:
            x = given["mu_topk_logprobs"]
            found["ids"] = per_token(ids, ids.shape[-1])
        assert x is not None
        found[f"log_{policy}"] = per_token(x, x.shape[-1])
    for name in ("A", *loss.INPUTS):
        x = given.get("advantages" if name == "A" else name)
        if name in read and x is not None:
            found[name] = per_token(x.to(dtype)) if x.dim() else x.detach().to(dtype)
    return found


def _piece_bytes(device: torch.device) -> int:
    """Of each float32 temporary that rows leave: on a CPU they stay in its cache and on its heap."""
    return 4 << 20 if device.type == "cpu" else 256 << 20


def _run(loss: Any, function: Callable[..., Any], rows: dict[str, Tensor], key: Any = None) -> Any:
    """One function of a chunk of rows; a single row, which torch.compile would make a program of its own for, runs as it is."""
    logits = rows["logits"]
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    params = loss._tensors_on(logits.device, dtype)
    with torch.no_grad():
        if logits.shape[0] == 1 and not torch.compiler.is_compiling():
            return function(type(loss), rows, params)
        return loss._compile((function, logits.dtype, *rows, key), function)(rows, params)


def _write(loss: Any, rows: dict[str, Tensor], into: Tensor) -> None:
    """d loss / dz of a chunk, written into a tensor that may be its logits."""
    own = into is rows["logits"]
    for places, values in _run(loss, _rows_backward, rows if own else rows | {"into": into}):
        into[torch.arange(len(places), device=places.device)[:, None], places] = values.to(into.dtype)


def _scores(rows: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """What the softmax is taken of: scaled, soft-capped, divided by the temperature. It may be the logits themselves."""
    z = _wide(logits)
    z = z * rows["logit_scale"] if "logit_scale" in rows else z
    z = rows["softcap"] * torch.tanh(z / rows["softcap"]) if "softcap" in rows else z
    return z * rows["inverse_t"] if "inverse_t" in rows else z


def _slope(rows: Mapping[str, Tensor], logits: Tensor) -> Tensor | float:
    """d score / d logit."""
    slope = rows.get("inverse_t", 1.0)
    slope = slope * rows["logit_scale"] if "logit_scale" in rows else slope
    if "softcap" not in rows:
        return slope
    z = _wide(logits)
    z = z * rows["logit_scale"] if "logit_scale" in rows else z
    return slope * (1 - torch.tanh(z / rows["softcap"]) ** 2)


def _if_live(rows: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """0 in dead rows, whatever they hold."""
    return torch.where(rows["live"], x, 0) if "live" in rows else x


def _columns(cls: Any, rows: Mapping[str, Tensor], params: Mapping[str, Tensor], log_pi: Tensor) -> dict[str, Any]:
    """The arguments of the vocabulary functions.

    The columns of a row are the vocabulary, or the k ids of a top-k sampler distribution and one bucket for the rest:
    there mu(v) is taken as gamma * pi(v), so that a sum over it is one term of the two masses.
    """
    columns = {k: _if_live(rows, x.to(log_pi.dtype)) for k, x in rows.items() if k.startswith("log_")}
    columns["log_pi"] = log_pi
    if "ids" in rows:
        head = log_pi.gather(1, _if_live(rows, rows["ids"]))
        rest_pi = torch.clamp(1 - head.exp().sum(-1, keepdim=True), min=1e-6)
        rest_mu = torch.clamp(1 - columns["log_mu"].exp().sum(-1, keepdim=True), min=0.0)
        columns["log_pi"] = torch.cat([head, rest_pi.log()], -1)
        columns["log_mu"] = torch.cat([columns["log_mu"], rest_mu.log()], -1)
    # A probability of 0 is e ** -10000: every product with it is exactly 0, and no difference of two is NaN.
    clamped = {k: torch.clamp(x, -1e4, 0.0) for k, x in columns.items()}
    given = {k: _if_live(rows, x) if x.dim() else x for k, x in rows.items() if k in ("A", *cls.INPUTS)}
    return dict(params) | given | clamped


def _call(cls: Any, part: str, columns: Mapping[str, Any]) -> Any:
    return getattr(cls, part)(**{k: columns[k] for k in cls._arguments[part]})


def _centre(cls: Any, columns: Mapping[str, Any]) -> Tensor:
    """The weights of the centring term; a spec may make them one number."""
    d = _call(cls, "centre", columns)
    return d if isinstance(d, Tensor) else torch.zeros_like(columns["log_pi"]) + d


def _head(d: Tensor, columns: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> Tensor:
    """Columns with a tail bucket -> the k ids: since sum_v pi(v) s_v = 0, the tail's share moves onto the head."""
    if "ids" not in rows:
        return d
    log_pi = columns["log_pi"]
    return d[:, :-1] - d[:, -1:] * exp(log_pi[:, :-1] - log_pi[:, -1:])


def _rows_forward(cls: Any, rows: dict[str, Tensor], params: dict[str, Tensor]) -> dict[str, Tensor]:
    """log pi of the sampled token, the log-normaliser, the sums over the vocabulary and the centring term of each row."""
    z = _scores(rows, rows["logits"])  # whatever a dead row holds stays in that row
    lse = _if_live(rows, torch.logsumexp(z, -1, keepdim=True))
    found = {"logp": _if_live(rows, z.gather(1, rows["tokens"]) - lse), "lse": lse}
    if cls.distribution is None and cls.centre is None:
        return found
    columns = _columns(cls, rows, params, _if_live(rows, z - lse))
    if cls.distribution is not None:
        found |= {k: x.to(z.dtype)[:, None] for k, x in _call(cls, "distribution", columns).items()}
    if cls.centre is not None:
        d = _head(_centre(cls, columns), columns, rows)
        found["centre"] = _if_live(rows, (d * columns["log_pi"][:, : d.shape[1]]).sum(-1, keepdim=True))
    return found


def _rows_backward(cls: Any, rows: dict[str, Tensor], params: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """d loss / dz = (D - pi * sum_v D(v)) * d score / dz of each row, where D(v) = d loss / d log pi(v).

    Its dense part is written into `into` (else over the logits); returned are the few places of a row that have more than
    that, with their whole value: it is formed in float32 and rounded once.
    """
    coef, tokens = rows["d:logp"], rows["tokens"]

    def log_pi(z: Tensor) -> Tensor:  # a tensor of its own, which the caller may change in place
        return _scores(rows, z) - rows["lse"]

    def scale(z: Tensor) -> Tensor | float:
        return _slope(rows, z) * rows["upstream"] if "upstream" in rows else _slope(rows, z)

    sums = {k.removeprefix("d:"): g for k, g in rows.items() if k.startswith("d:") and k != "d:logp"}
    d: Tensor | None = None
    if sums or "centre" in rows:
        columns = _columns(cls, rows, params, _if_live(rows, log_pi(rows["logits"])))
        if sums:
            d = _call(cls, "d_distribution", columns | {"grads": sums})
        if "centre" in rows:
            centred = rows["centre"] * _centre(cls, columns)
            d = centred if d is None else d + centred
        assert d is not None
        d = _head(d, columns, rows)
    total = coef if d is None else coef + d.sum(-1, keepdim=True)
    logits, slope = rows["logits"], scale(rows["logits"])
    dense = log_pi(logits).exp_().mul_(-(total * slope))
    if d is not None and "ids" not in rows:
        dense = dense + d * slope

    def at(places: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        z = logits.gather(1, places)
        return places, _if_live(rows, (extra - log_pi(z).exp() * total) * scale(z))

    if d is None:
        sparse = [at(tokens, coef)]
    elif "ids" not in rows:
        sparse = [at(tokens, coef + d.gather(1, tokens))]
    else:
        ids = _if_live(rows, rows["ids"])
        sparse = [at(ids, d), at(tokens, coef + torch.where(ids == tokens, d, 0.0).sum(-1, keepdim=True))]
    rows.get("into", logits).copy_(dense.masked_fill_(~rows["live"], 0.0) if "live" in rows else dense)
    return sparse
