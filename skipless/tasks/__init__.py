"""What commands do with models: fine-tune, measure."""
