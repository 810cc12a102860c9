"""Lightning with a validation loader, as most of its users have one."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def training_step(self, batch, _):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        mean = self.all_gather(loss.detach()).mean().item()
        self.print(f"loss {mean:.6f}")
        return loss

    def validation_step(self, batch, _):
        inputs, labels = batch
        self.log("val", nn.functional.cross_entropy(self.layers(inputs), labels), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0, verbose=False)
inputs, labels = torch.randn(256, 16), torch.randint(0, 4, (256,))
train = DataLoader(TensorDataset(inputs[:192], labels[:192]), batch_size=8, shuffle=True)
validation = DataLoader(TensorDataset(inputs[192:], labels[192:]), batch_size=8)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), train, validation)
