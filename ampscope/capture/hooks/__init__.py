"""What is put around a training loop's own calls; each call goes on to whoever listens."""
