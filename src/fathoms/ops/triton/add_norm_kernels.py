"""Triton kernels of a join: the scaled branch is added to the stream, and the next norm reads the sum at once.

With s = x + scale * branch, y = weight * h(s) + bias, and d the gradients of both outputs, the backward pass
g = ds + h'(s)ᵀ (weight * dy), dx = g, dbranch = scale * g goes over the tokens once. On that way each program keeps its
own share of the sums over tokens (of scale, weight, bias, alpha and shift) in registers, and writes it at its end.
"""

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

TWO_OVER_SQRT_PI = tl.constexpr(1.1283791670955126)


@triton.jit
def channels(at, stride, c, D: tl.constexpr, absent: tl.constexpr):
    """A parameter of the channels `c` as a row, or the number that stands for one that is not there."""
    value = absent
    if at is not None:
        value = tl.load(at + c * stride, mask=c < D, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit
def tanh(u):
    """The tanh of u. Of the absolute value, so that the exponential cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(u))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(u < 0.0, -size, size)


@triton.jit
def forward_kernel(
    x_ptr, f_ptr, scale_ptr, w_ptr, b_ptr, alpha_ptr, shift_ptr, s_ptr, y_ptr, stat_ptr,
    rows, x_r, f_r, scale_d, w_d, b_d, alpha_d, shift_d, eps,
    D: tl.constexpr, C: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Stream s and normed y of R tokens, C channels of them, and what a norm measured of each token."""
    n = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.program_id(1) * C + tl.arange(0, C)
    here = (n < rows)[:, None] & (c < D)[None, :]
    row = n.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row * x_r + c[None, :], mask=here, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + row * f_r + c[None, :], mask=here, other=0.0).to(tl.float32)
    narrow = (x + f * channels(scale_ptr, scale_d, c, D, 1.0)).to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + row * D + c[None, :], narrow, mask=here)
    # The norm reads the stream as it was written, which is what the backward pass will read.
    s = narrow.to(tl.float32)
    if KIND == "layernorm":
        mean = tl.sum(s, 1) / D
        h = tl.where(here, s - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(h * h, 1) / D + eps)
        h = h * rstd[:, None]
        tl.store(stat_ptr + n, rstd, mask=n < rows)
        tl.store(stat_ptr + rows + n, mean, mask=n < rows)
    elif KIND == "rmsnorm" or KIND == "scalenorm":
        total = tl.sum(s * s, 1)
        rstd = tl.rsqrt(total / D + eps) if KIND == "rmsnorm" else 1.0 / tl.maximum(tl.sqrt(total), eps)
        h = s * rstd[:, None]
        tl.store(stat_ptr + n, rstd, mask=n < rows)
    elif KIND == "learnable_scaler":
        h = s
    else:
        alpha = channels(alpha_ptr, alpha_d, c, D, 1.0)
        u = s * alpha + channels(shift_ptr, shift_d, c, D, 0.0)
        h = tl.erf(u) if KIND == "derf" else tanh(u)
    y = h * channels(w_ptr, w_d, c, D, 1.0) + channels(b_ptr, b_d, c, D, 0.0)
    tl.store(y_ptr + row * D + c[None, :], y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def keep(at, total, c, D: tl.constexpr):
    """Write this program's share of a sum over tokens."""
    if at is not None:
        tl.store(at + tl.program_id(0) * D + c, tl.sum(total, 0), mask=c < D)


@triton.jit
def backward_kernel(
    ds_ptr, dy_ptr, s_ptr, f_ptr, scale_ptr, w_ptr, alpha_ptr, shift_ptr, stat_ptr,
    dx_ptr, df_ptr, dscale_ptr, dw_ptr, db_ptr, dalpha_ptr, dshift_ptr,
    rows, ds_r, dy_r, f_r, scale_d, w_d, alpha_d, shift_d, eps,
    D: tl.constexpr, C: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of stream and branch, R tokens at a time, and one program's share of the sums over tokens."""
    c = tl.program_id(1) * C + tl.arange(0, C)
    scale = channels(scale_ptr, scale_d, c, D, 1.0)
    weight = channels(w_ptr, w_d, c, D, 1.0)
    alpha = channels(alpha_ptr, alpha_d, c, D, 1.0)
    shift = channels(shift_ptr, shift_d, c, D, 0.0)
    dscale = tl.zeros((R, C), tl.float32)
    dweight = tl.zeros((R, C), tl.float32)
    dbias = tl.zeros((R, C), tl.float32)
    dalpha = tl.zeros((R, C), tl.float32)
    dshift = tl.zeros((R, C), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0), num_stages=STAGES):
        n = tile * R + tl.arange(0, R)
        here = (n < rows)[:, None] & (c < D)[None, :]
        row = n.to(tl.int64)[:, None]
        dy = tl.load(dy_ptr + row * dy_r + c[None, :], mask=here, other=0.0).to(tl.float32)
        g = tl.load(ds_ptr + row * ds_r + c[None, :], mask=here, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + row * D + c[None, :], mask=here, other=0.0).to(tl.float32)
        dh = dy * weight
        if KIND == "layernorm" or KIND == "rmsnorm" or KIND == "scalenorm":
            rstd = tl.load(stat_ptr + n, mask=n < rows, other=0.0)[:, None]
            if KIND == "layernorm":
                h = (s - tl.load(stat_ptr + rows + n, mask=n < rows, other=0.0)[:, None]) * rstd
                mean = tl.sum(dh, 1)[:, None] / D
                g += rstd * (dh - mean - h * (tl.sum(dh * h, 1)[:, None] / D))
            elif KIND == "rmsnorm":
                h = s * rstd
                g += rstd * (dh - h * (tl.sum(dh * h, 1)[:, None] / D))
            else:
                h = s * rstd
                # A token shorter than eps was divided by eps, which does not depend on it.
                along = tl.where(rstd * eps < 1.0, tl.sum(dh * h, 1)[:, None], 0.0)
                g += rstd * (dh - h * along)
        elif KIND == "learnable_scaler":
            h = s
            g += dh
        else:
            u = s * alpha + shift
            h = tl.erf(u) if KIND == "derf" else tanh(u)
            slope = TWO_OVER_SQRT_PI * tl.exp(-u * u) if KIND == "derf" else 1.0 - h * h
            du = dh * slope
            g += du * alpha
            dalpha += du * s
            if dshift_ptr is not None:
                dshift += du
        tl.store(dx_ptr + row * D + c[None, :], g.to(dx_ptr.dtype.element_ty), mask=here)
        if scale_ptr is not None:
            f = tl.load(f_ptr + row * f_r + c[None, :], mask=here, other=0.0).to(tl.float32)
            tl.store(df_ptr + row * D + c[None, :], (g * scale).to(df_ptr.dtype.element_ty), mask=here)
            dscale += g * f
        if dw_ptr is not None:
            dweight += dy * h
        if db_ptr is not None:
            dbias += dy
    keep(dscale_ptr, dscale, c, D)
    keep(dw_ptr, dweight, c, D)
    keep(db_ptr, dbias, c, D)
    keep(dalpha_ptr, dalpha, c, D)
    keep(dshift_ptr, dshift, c, D)
