"""What models are made of, in torch: layers over a chunk of clients, recurrent ones, links, augmentation."""
