"""Step PyTorch/XLA's own ZeRO-1 with weights in bf16, on one process of its CPU device: zero_run.py, by test_xla.py."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from models.device.config import DeviceConf, DeviceName, Precision
from models.device.device import Device
from models.device.opening import open_device
from train.config.run import ParallelConf, Weights
from train.distributed.xla import ShardedAdamW, XlaParallel
from train.optim import allocate_optimizer_states

STEPS, STOP = 4, 2


def build_module(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)).to(device)


def build_sharded(device: Device) -> tuple[nn.Module, ShardedAdamW]:
    module = build_module(device.torch_device)
    optimizer = ShardedAdamW(module.parameters(), lr=0.01)
    allocate_optimizer_states([optimizer])
    return module, optimizer


def step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int, device: Device) -> None:
    """Take a step by gradients that bf16 can hold, the same for every type of weights."""
    random = torch.Generator().manual_seed(number)
    for weight in module.parameters():
        gradient = torch.randn(weight.shape, generator=random).to(torch.bfloat16)
        weight.grad = gradient.to(weight.dtype).to(weight.device)
    optimizer.step()
    device.synchronize()


def read(tensors: Any) -> list[Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors]


def main() -> None:
    device = open_device(DeviceConf(name=DeviceName.xla, precision=Precision.bfloat16))
    accelerator: Any = SimpleNamespace(process_index=0, num_processes=1)
    parallel = XlaParallel(conf=ParallelConf(draft=Weights.sharded), device=device, accelerator=accelerator)
    plain = build_module(torch.device("cpu"))
    adamw = AdamW(plain.parameters(), lr=0.01)
    host = Device(name="cpu", torch_device=torch.device("cpu"), dtype=torch.float32, compiles=False)
    module, optimizer = build_sharded(device)
    parallel.prepare_optimizers([optimizer])
    for number in range(STEPS):
        if number == STOP:  # a new process goes on with what a state holds
            with parallel.full_moments([optimizer]):
                weights = read(module.parameters())
                moments = [{key: value.cpu() for key, value in optimizer.state[p].items()} for p in module.parameters()]
            module, optimizer = build_sharded(device)
            for weight, saved, values in zip(module.parameters(), weights, moments, strict=True):
                assert saved.dtype is torch.float32
                weight.data.copy_(saved)
                optimizer.state[weight] = {key: value.to(device.torch_device) for key, value in values.items()}
            parallel.prepare_optimizers([optimizer])
        step(module, optimizer, number, device)
        step(plain, adamw, number, host)
    assert {weight.dtype for weight in module.parameters()} == {torch.bfloat16}
    rounded = read(module.parameters())
    with parallel.full_moments([optimizer]):
        masters = read(module.parameters())
    for ours, expected, low in zip(masters, plain.parameters(), rounded, strict=True):
        torch.testing.assert_close(ours, expected.detach(), atol=1e-6, rtol=1e-5)
        assert torch.equal(ours.to(torch.bfloat16), low)


if __name__ == "__main__":
    main()
