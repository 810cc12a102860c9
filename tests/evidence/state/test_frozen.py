"""Which frozen modules outside of the wrapped model count."""

import torch
from torch import nn

from rankscope.wrappers.living import frozen_modules, living_modules


def make_teacher(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).requires_grad_(False)


def test_only_outermost_modules_of_ordinary_frozen_tensors_count():
    teacher, trained = make_teacher(0), nn.Linear(2, 2)
    holder = nn.ModuleList([trained, teacher])
    meta = nn.Linear(2, 2, device="meta").requires_grad_(False)
    ours = {id(each) for each in (teacher, *teacher, trained, holder, meta)}
    assert [id(m) for m in frozen_modules(living_modules(set())) if id(m) in ours] == [id(teacher)]
    inside = {id(part) for part in teacher.modules()}
    assert [id(m) for m in frozen_modules(living_modules(inside)) if id(m) in ours] == []
