"""What a drafting method is; knows neither the engine nor the trainer."""
