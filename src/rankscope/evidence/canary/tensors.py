"""Saves tensors that a forward pass may change, before a canary, and puts them back after it.

Small buffers and attributes are copied at once; parameters and large tensors, when an operation is
about to write into them (a momentum teacher, a codebook, clamped weights), so that a frozen base
costs nothing. All get back their memory, where ``.data`` was replaced, and their version counters;
parameters also get back their ``.grad``, which is set aside meanwhile.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rankscope.evidence.canary.batch import CanaryDeclined

AT_ONCE_BYTES = 2**20
"""Up to this size buffers and attributes are copied before the run, whether it writes or not."""


class SavedTensors:
    """The saved identity and content of parameters and other tensors."""

    def __init__(self, parameters: Iterable[Tensor], others: Iterable[Tensor]) -> None:
        self._parameters = [_SavedTensor(p) for p in parameters if not is_lazy(p)]
        self._others = [_SavedTensor(t) for t in others if not is_lazy(t) and _is_writable(t)]
        self._unwritten: dict[int, list[_SavedTensor]] = {}
        self._copying = threading.RLock()  # a backward pass may write in several threads
        for saved in self._parameters:
            self._wait_for_write(saved)
        for saved in self._others:
            tensor = saved.tensor
            if _is_plain(tensor) and tensor.nbytes <= AT_ONCE_BYTES and saved.node is None:
                saved.save_bits()
            else:
                self._wait_for_write(saved)
        self._gradients = [(p, p.grad) for p in (k.tensor for k in self._parameters) if p.is_leaf]
        for parameter, gradient in self._gradients:
            parameter.grad = gradient  # raises now if this could not be done again

    def _wait_for_write(self, saved: "_SavedTensor") -> None:
        for storage in _storages(saved.tensor):
            self._unwritten.setdefault(storage, []).append(saved)

    def set_gradients_aside(self) -> None:
        """Leave every parameter without a gradient until all is put back."""
        for parameter, _ in self._gradients:
            parameter.grad = None

    def before_write(self, tensor: Tensor) -> None:
        """Copy the tensors that share memory with ``tensor``, which is about to be written."""
        for storage in _storages(tensor):
            with self._copying:
                for saved in self._unwritten.get(storage, ()):
                    saved.save_bits()
                self._unwritten.pop(storage, None)  # not if that raised: the model may try again

    @property
    def nodes(self) -> frozenset[Any]:
        """The graph nodes that made these tensors."""
        return frozenset(saved.node for saved in self._others if saved.node is not None)

    def restore_steps(self) -> Iterator[Callable[[], None]]:
        """Yield the functions that put back all changes, without effect on pending graphs."""
        for saved in (*self._parameters, *self._others):
            yield saved.put_back
        for parameter, gradient in self._gradients:  # which have their types again
            yield partial(setattr, parameter, "grad", gradient)


class _SavedTensor:
    """One tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.node: Any = tensor.grad_fn
        self._trained = tensor.requires_grad
        self._version = None if tensor.is_inference() else tensor._version
        self._before = tensor.data  # the same memory, and no version counter of the tensor's
        self._bits: Tensor | None = None

    def save_bits(self) -> None:
        """Copy its content."""
        if self.node is not None and self.tensor.grad_fn is self.node:
            raise CanaryDeclined(
                "a canary puts back what the forward pass changes, and this one writes into a "
                "tensor that is part of a graph of the training, which cannot be"
            )
        if not (_is_plain(self._before) and _is_writable(self._before)):
            raise CanaryDeclined(
                "a canary puts back what the forward pass changes, and this one writes into a "
                f"tensor of the kind {type(self.tensor).__name__}, {self.tensor.layout}, which "
                "cannot be"
            )
        self._bits = self._before.clone()

    @torch.no_grad()
    def put_back(self) -> None:
        """Put back its memory, its content, and its version counter."""
        if not _is_same(self.tensor.data, self._before):
            self.tensor.data = self._before
        if self._bits is not None:
            self._before.copy_(self._bits)
        if self.node is None and self.tensor.grad_fn is not None and not self.tensor._is_view():
            self.tensor.detach_()
        if self.tensor.is_leaf and self.tensor.requires_grad != self._trained:
            self.tensor.requires_grad_(self._trained)
        if self._version is not None and self.tensor._version != self._version:
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self._version,))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's bits can be copied: it is neither sparse nor made of others."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def _is_writable(tensor: Tensor) -> bool:
    """Return whether the forward pass can write into a tensor: no two elements share memory."""
    if tensor.is_meta or tensor.is_inference() or tensor.is_mkldnn:
        return False
    return tensor.layout is not torch.strided or not any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if _storages(one) != _storages(other) or one.layout is not torch.strided:
        return _storages(one) == _storages(other)
    return one.stride() == other.stride() and one.storage_offset() == other.storage_offset()


def _storages(tensor: Tensor) -> list[int]:
    """Return the memory of a tensor, of its parts, or of a sparse one's values."""
    outer: Any = tensor
    if is_traceable_wrapper_subclass(outer):
        names, _ = outer.__tensor_flatten__()
        inside = [part for name in names if isinstance(part := getattr(outer, name), Tensor)]
        return [storage for part in inside for storage in _storages(part)]
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    return [tensor.untyped_storage()._cdata]
