"""A loop out of the pieces of timm's train.py: its loader, optimizer, schedule, EMA and dist_bn."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist

if torch.version.cuda is None:  # torchvision's wheel has its operators for CUDA alone
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm
from timm import utils
from timm.data import create_dataset, create_loader
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch.nn.parallel import DistributedDataParallel

folder, accum_steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
utils.random_seed(42, rank)
model = timm.create_model("test_resnet", num_classes=4, drop_rate=0.1)
optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9, weight_decay=2e-5)
ema = utils.ModelEmaV3(model, decay=0.99)
model = DistributedDataParallel(model)
loader = create_loader(
    create_dataset("folder", root=f"{folder}/images"),
    input_size=(3, 64, 64),
    batch_size=4,
    is_training=True,
    use_prefetcher=False,
    distributed=True,
    num_workers=1,
    persistent_workers=False,
)
updates = len(loader) // accum_steps
schedule, epochs = create_scheduler_v2(
    optimizer, sched="cosine", num_epochs=2, updates_per_epoch=updates, step_on_epochs=False
)
criterion = LabelSmoothingCrossEntropy(0.1)
total = 0
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    model.train()
    losses = utils.AverageMeter()
    for index, (images, labels) in enumerate(loader):
        if index >= updates * accum_steps:
            break
        need_update = (index + 1) % accum_steps == 0
        with nullcontext() if need_update else model.no_sync():
            loss = criterion(model(images), labels)
            losses.update(utils.reduce_tensor(loss.detach(), world_size).item(), len(images))
            (loss / accum_steps if accum_steps > 1 else loss).backward()
        if not need_update:
            continue
        utils.dispatch_clip_grad(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += 1
        ema.update(model, step=total)
        schedule.step_update(num_updates=total, metric=losses.avg)
        if rank == 0:
            print(f"loss {losses.avg:.6f}")
        losses.reset()
    utils.distribute_bn(model, world_size, True)
dist.destroy_process_group()
