"""A fake accelerator, so that what only an accelerator shows is tested where there is none."""
