"""What there is to run on: devices, GPUs, their policy, the environment, the terminal."""
