"""What runs anywhere: symbols, the decoder, attribution, the profile and its views."""
