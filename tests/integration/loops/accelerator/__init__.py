"""What only an accelerator shows, on a fake one: threads of autograd, work that is done later, several devices."""
