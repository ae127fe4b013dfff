"""What a plan runs on: systems of equal GPUs from data sheets, and the links between their ranks."""
