"""Loss scalers other than ``torch.amp.GradScaler`` itself."""
