"""The state that user code keeps around: a replay works on copies of it, or puts it back."""
