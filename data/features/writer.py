"""Builder of shards: the target's features of packed rows, quantized and in the order of the plan.

The output of the target's pass is quantized on the device, so that only a fraction of it is copied to the host. The
batches of a shard depend only on the plan, so a shard that is captured again, by as many processes, has the same bytes.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from data.config import TeacherKind
from data.features.plan import CapturePlan
from data.features.schema import SCALE_SUFFIX, FeatureSchema, dequantize, quantize, rounding_error
from data.features.target_pass import build_target_pass
from models.batch import Batch
from models.io.errors import require
from models.losses.distributions import TopKLogits
from models.targets.target import Target

ROUNDING_SUFFIX = ".rounding"  # follows the name of the rounded tensor; not stored
LOGITS_CHUNK = 256  # positions whose logits are in memory at a time


class ShardBuilder:
    """A builder of a plan's shards, which runs the target on their rows."""

    def __init__(self, target: Target, plan: CapturePlan, *, batch: int):
        self.target, self.plan, self.batch = target, plan, batch
        self._pass = build_target_pass(target, compiled=True)
        self._compute = target.device.compile_if_lazy(self.compute_stored_features)
        # of all shards so far, by tensor: sums over rows of `rounding_error`, and the number of rows
        self._error_sums: defaultdict[str, Any] = defaultdict(float)
        self._num_rows: Counter[str] = Counter()

    @torch.no_grad()
    def compute_stored_features(self, batch: Batch) -> dict[str, Tensor]:
        """Return every tensor of the schema, and the rounding errors, at every position."""
        schema = self.plan.schema
        target_output = self._pass(self.target, schema.layers, batch)
        tensors: dict[str, Tensor] = {}
        if target_output.captured is not None:
            states = target_output.captured.unflatten(-1, (len(schema.layers), schema.hidden_size))
            tensors |= quantize_states("captured", states, schema)
        if schema.hidden or schema.teacher is TeacherKind.hidden:
            tensors |= quantize_states("hidden", target_output.hidden, schema)
        if schema.teacher is TeacherKind.topk:
            tensors |= self._topk_tensors(target_output.hidden)
        return tensors

    def _topk_tensors(self, hidden: Float[Tensor, "rows length hidden"]) -> dict[str, Tensor]:
        parts = [
            TopKLogits.from_logits(self.target.logits(chunk), self.plan.schema.top_k)
            for chunk in hidden.flatten(0, 1).split(LOGITS_CHUNK)
        ]
        dtypes = {"ids": torch.int32, "log_probs": torch.float16, "rest": torch.float32}
        return {
            f"teacher.{name}": torch.cat([getattr(part, name) for part in parts])
            .to(dtype)
            .unflatten(0, hidden.shape[:2])
            for name, dtype in dtypes.items()
        }

    def list_batches(self, shard: int) -> list[list[int]]:
        """List the rows of each pass of the target over a shard."""
        rows = self.plan.shard_rows(shard)
        return [rows[first : first + self.batch] for first in range(0, len(rows), self.batch)]

    def build_shard(self, number: int, *, count_batch: Callable[[], object] = lambda: None) -> dict[str, Tensor]:
        """Return a shard's tensors; call `count_batch` after each pass. Raises UserError for features not finite."""
        specs = self.plan.schema.tensor_specs
        tokens, supervised = self.plan.shard_token_counts[number].tolist()
        shard = {
            spec.name: torch.empty((tokens if spec.per_token else supervised, *spec.shape), dtype=spec.dtype)
            for spec in specs
        }
        unfilled = dict(shard)
        for batch_rows in self.list_batches(number):
            features = self._features_on_host(batch_rows)
            token_index, supervised_index = map(torch.from_numpy, self.plan.stored_positions(batch_rows))
            for name, _, _, per_token in specs:
                index = token_index if per_token else supervised_index
                filled, unfilled[name] = unfilled[name].tensor_split([len(index)])
                filled.copy_(_select_rows(features[name], index))
                if name + ROUNDING_SUFFIX in features:
                    self._error_sums[name] += features[name + ROUNDING_SUFFIX][index].double().sum(0)
                    self._num_rows[name] += len(index)
                if name == "teacher.rest":
                    _require_finite(bool(filled.isfinite().all()), "the final")
            count_batch()
        self.measure_rounding()  # raises for features that are not finite, before the shard is written
        return shard

    def _features_on_host(self, rows: list[int]) -> dict[str, Tensor]:
        """Return the features of rows, flattened over positions, on the host."""
        # The last batch is filled up with other rows, so that every batch has one size and one graph.
        full_batch = [(rows[0] + i) % len(self.plan.packed) for i in range(self.batch)]
        batch = self.plan.packed.batch(full_batch).to(self.target.device.torch_device)
        return {name: values.cpu().flatten(0, 1) for name, values in self._compute(batch).items()}

    def measure_rounding(self) -> dict[str, tuple[float, float]]:
        """Return each layer's rounding: the root mean square of |x - stored| / |x|, and the share of values lost."""
        layers = {"captured": map("layer {}".format, self.plan.schema.layers), "hidden": ["final"]}
        rounding = {}
        for name, error_sums in self._error_sums.items():
            errors = (error_sums / self._num_rows[name]).view(-1, 2).tolist()
            for layer, (squared, lost) in zip(layers[name], errors, strict=True):
                _require_finite(math.isfinite(squared), layer)
                rounding[layer] = squared**0.5, lost
        return rounding


def _require_finite(is_finite: bool, layer: str) -> None:
    require(
        is_finite,
        f"device.precision: features must be finite, got NaN or infinity at {layer}; choose another precision",
    )


def _select_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return `values[index]`, which PyTorch 2.9 does not support for fp8 on the host."""
    as_bytes = values.view(torch.int8) if values.itemsize == 1 else values
    return as_bytes[index].view(values.dtype)


def quantize_states(name: str, states: Float[Tensor, "*batch width"], schema: FeatureSchema) -> dict[str, Tensor]:
    """Return the quantized values, the scales and the rounding error of each hidden state."""
    values, scale = quantize(states, schema.dtype)
    error = rounding_error(states, dequantize(values, scale))
    return {name: values, name + ROUNDING_SUFFIX: error} | ({} if scale is None else {name + SCALE_SUFFIX: scale})
