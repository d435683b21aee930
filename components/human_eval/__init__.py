"""Is the policy better than SFT, judged blind: sample and blind responses, hand out a sheet, score what comes back."""
