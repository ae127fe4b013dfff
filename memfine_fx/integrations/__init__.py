"""What connects memfine_fx to the trainers around it; each module needs the package that it is named after."""
