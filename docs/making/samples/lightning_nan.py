import lightning
import torch
from torch import nn

from ampscope.integrations.lightning import WatchCallback


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch, batch_index):
        inputs, labels = batch
        probabilities = torch.softmax(self.net(inputs), dim=-1)
        loss = -torch.log(probabilities)[torch.arange(len(labels)), labels].mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=3.0)


torch.manual_seed(0)
inputs, labels = torch.randn(512, 20) * 4, torch.randint(0, 4, (512,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=32)
trainer = lightning.Trainer(max_epochs=2, precision="bf16-mixed", callbacks=[WatchCallback()])
trainer.fit(Classifier(), loader)
