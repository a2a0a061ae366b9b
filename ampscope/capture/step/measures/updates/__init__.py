"""What an optimizer means to write into half precision, and whether it arrives there."""
