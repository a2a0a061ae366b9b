"""What is asked of steps that look good: losses to half precision, spikes, standstill, audits."""
