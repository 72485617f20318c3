"""Adam without torch's compiler behind it."""

from __future__ import annotations

import inspect

import torch


class Adam(torch.optim.Adam):
    """torch.optim.Adam to the bit, without `import torch._dynamo`.

    torch wraps these methods so that its compiler leaves them alone, and the wrappers import the
    compiler to say so: 150 MB of memory and seconds of every run, most of which compile nothing.
    """

    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Adam.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))
